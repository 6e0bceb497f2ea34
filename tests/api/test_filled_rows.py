"""Rows of packed texts are padded where products would pad them; heads give what they give without padding."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from headway.api import Answerer, Classifier, Embedder, Tagger, TextEncoder
from headway.models import Head, ModelSpec, build
from headway.patterns import GlobalKeys, GlobalQueries, Window
from headway.text import Encoded

LABELS = ("a", "b")
TASKS: dict[str, tuple[Callable[..., TextEncoder], Head]] = {
    "answer": (Answerer, Head("answer")),
    "classify": (Classifier, Head("classify", labels=LABELS)),
    "embed": (Embedder, Head("embed", pool="mean", unit=True)),
    "tag": (Tagger, Head("tag", labels=LABELS)),
}
SIZES = {"vocab": 100, "width": 32, "layers": 2, "heads": 2, "hidden": 64, "trained_context": 512}
SEES = Window.around(4) | GlobalKeys() | GlobalQueries()


def pair(question: int, context: int) -> Encoded:
    """Returns a question and a context with the special tokens that a template puts around them."""
    texts = [None, *[0] * question, None, *[1] * context, None]
    return replace(Encoded.of([*range(4, 4 + len(texts))]), texts=texts)


@pytest.mark.parametrize("task", TASKS)
def test_what_fills_a_row_changes_nothing(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with global tokens; only the rows of tasks that pool are padded."""
    api, head = TASKS[task]
    spec = ModelSpec.of("longformer", **SIZES, patterns=SEES).with_head(head)
    model = api(build(spec, seed=0).eval())
    texts = [pair(5, 30), pair(3, 50)]
    slots: list[int] = []
    hidden = model.model.hidden

    def seen(ids: torch.Tensor, **options: object) -> torch.Tensor:
        slots.append(ids.shape[1])
        out: torch.Tensor = hidden(ids, **options)  # type: ignore[arg-type]
        return out

    monkeypatch.setattr(model.model, "hidden", seen)
    outputs = []
    for fills in (False, True):
        monkeypatch.setattr("headway.api.encoders.fills", lambda like, fills=fills: fills)
        outputs.append(model.read(texts))
    assert slots == [94, 96 if task in ("classify", "embed") else 94]
    for plain, filled in zip(*outputs, strict=True):
        torch.testing.assert_close(filled, plain, rtol=0, atol=1e-5)
