"""In training, dropout is applied where `transformers` applies it: to the same tensors, in the same order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from headway.checkpoints import load_folder
from headway.checkpoints.restore import build_model
from headway.models import Encoder, Head, ModelSpec, build
from headway.tokens import Tokens
from tests.pairwise import chequered

SIZE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 20,
    "hidden_dropout_prob": 0.25,
    "attention_probs_dropout_prob": 0.0,  # of attention weights, which are drawn in another way here
    "initializer_range": 0.3,
}
MORE: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {},
    "RoFormer": {"embedding_size": 32},
    "Longformer": {"attention_window": 4},
}
CLASSES = {
    "masked-lm": "ForMaskedLM",
    "classify": "ForSequenceClassification",
    "tag": "ForTokenClassification",
    "answer": "ForQuestionAnswering",
    "states": "Model",
}
Drops = list[tuple[float, tuple[int, ...]]]


@pytest.fixture
def drops(monkeypatch: pytest.MonkeyPatch) -> Drops:
    """The calls of dropout in order; the n-th call uses the n-th mask, so that equal places give equal numbers."""
    dropped: Drops = []

    def drop(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        dropped.append((p, tuple(x.shape)))
        generator = torch.Generator().manual_seed(len(dropped))
        return x * (torch.rand(x.shape, generator=generator) >= p) / (1 - p)

    monkeypatch.setattr(torch.nn.functional, "dropout", drop)
    return dropped


def taken(drops: Drops, run: Callable[[], Tensor]) -> tuple[Tensor, Drops]:
    drops.clear()
    return run(), list(drops)


@chequered("family,task", list(MORE), list(CLASSES))
def test_dropout_falls_where_it_does_in_transformers(
    family: str, task: str, drops: Drops, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **SIZE, **MORE[family], num_labels=2 if task == "answer" else 3
    )
    reference = getattr(transformers, family + CLASSES[task])(config)
    reference.save_pretrained(tmp_path)
    model = build_model(load_folder(tmp_path))
    assert isinstance(model, Encoder)
    ids = torch.randint(5, 61, (2, 8), generator=torch.Generator().manual_seed(1))
    # No token is global: `transformers` drops the output of global tokens once, too, but here in a separate call.
    options = {"global_attention_mask": torch.zeros(2, 8).long()} if family == "Longformer" else {}

    def theirs() -> Tensor:
        out = reference.train()(ids, **options)
        return torch.stack((out[0], out[1]), -1) if task == "answer" else out[0]

    expected, expected_places = taken(drops, theirs)
    states, places = taken(drops, lambda: model.train()(ids))
    assert places == expected_places
    assert len(places) > 1 + 2 * 2 - (task in ("masked-lm", "answer", "states"))
    largest = float(expected.detach().abs().max())
    assert float((states - expected).detach().abs().max()) <= 2e-5 * largest
    _, in_eval = taken(drops, lambda: model.eval()(ids))
    assert in_eval == []


@pytest.mark.parametrize(("family", "count"), [("bert", 1), ("nezha", 1), ("roberta", 2), ("longformer", 2)])
def test_a_head_that_is_put_on_later_drops_as_its_family_does(family: str, count: int, drops: Drops) -> None:
    spec = ModelSpec.of(family, vocab=61, width=48, layers=1, heads=4, hidden=80)
    with_dense = Head("classify", labels=("a", "b"), dense="tanh")
    for head, expected in ((with_dense, count), (Head("classify", labels=("a", "b")), 1), (Head("embed"), 0)):
        model = build(spec.with_head(head), seed=0)
        assert isinstance(model, Encoder)
        _, places = taken(drops, lambda model=model: model.head(torch.ones(2, 3, 48), Tokens.range(3)))
        assert places == [(0.1, (2, 48))] * expected
