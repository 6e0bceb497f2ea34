"""Small encoders for every task, and a server of all of them."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headway.api import Answerer, Classifier, Embedder, MaskedLM, Tagger, TextEncoder
from headway.models import Encoder, Head, ModelSpec, build
from headway.serve.calls import served_as
from headway.serve.models import Models
from headway.serve.worker import Worker
from headway.text import Tokenizer
from tests.serve.conftest import House, placed, running, talker
from tests.serve.test_guard import ask

WORDS = """the cat sat on a mat dog ran home . , who where is not ##s ##ting b c d e f g""".split()  # noqa: SIM905
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
LABELS = ("O", "B-PER", "I-PER", "B-LOC")
ULP = 2.0**-23
"""Outputs are rounded to float32 once: in a batch, sums in float64 may round to the neighbouring number."""
KINDS: dict[str, tuple[type[TextEncoder], Head]] = {
    "embedder": (Embedder, Head("embed", pool="mean", unit=True)),
    "labels": (Classifier, Head("classify", labels=("no", "yes", "perhaps"), dense="tanh")),
    "ranker": (Classifier, Head("classify", labels=("score",), dense="tanh")),
    "tagger": (Tagger, Head("tag", labels=LABELS)),
    "answerer": (Answerer, Head("answer")),
    "filler": (MaskedLM, Head("masked-lm", dense="gelu")),
}


def words(path: Path) -> Tokenizer:
    """Returns a WordPiece tokenizer like BERT's."""
    (path / "vocab.txt").write_text("\n".join(VOCAB))
    (path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return Tokenizer.load(path)


def encoder(
    kind: str, tokenizer: Tokenizer, dtype: torch.dtype = torch.float64, **options: Any
) -> TextEncoder:
    """Returns an encoder with random weights, large enough to tell right results from wrong ones."""
    wrapper, head = KINDS[kind]
    spec = ModelSpec.of("bert", vocab=len(VOCAB), width=32, layers=2, heads=4, hidden=48, trained_context=64)
    model = build(spec.with_head(head), seed=3, dtype=dtype).eval()
    assert isinstance(model, Encoder)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return wrapper(model, tokenizer, **options)


@contextmanager
def serving_encoders(
    models: dict[str, Any],
    *,
    exact: bool = False,
    most: int = 256,
    decoders: Sequence[str] = ("talker",),
    **options: Any,
) -> Iterator[House]:
    """Yields a server of these models and of decoders."""
    worker = Worker(most)
    named = {**models, **dict.fromkeys(decoders, talker())}
    served = [served_as(name, model, worker, keep=1 << 20, exact=exact) for name, model in named.items()]
    with running(Models(placed(*served)), worker, **options) as house:
        yield house


def answered(house: House, path: str, **body: Any) -> dict[str, Any]:
    status, response = ask(house, path, body)
    assert status == 200, response
    return response
