"""Shared by the tests of Longformer's claims: a small encoder and its ids."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.models import Encoder, Head, ModelSpec, build
from headway.patterns import Pattern
from headway.positions import Learned

VOCAB, HEADS = 31, 4
SIZE: dict[str, Any] = {
    "vocab": VOCAB, "width": 16, "heads": HEADS, "hidden": 24, "init_std": 0.3, "dropout": 0.0,
    "attention_dropout": 0.0, "trained_context": 64,
}  # fmt: skip
EXACT = 1e-12
"""Tolerance relative to the largest value: float64 rounds to 1e-16, and sums of a few hundred terms are compared."""


def encoder(patterns: Pattern | Sequence[Pattern], layers: int = 2, **fields: Any) -> ModelSpec:
    return ModelSpec.of(
        "longformer",
        **{**SIZE, "positions": Learned(64, offset=2), "layers": layers, "patterns": patterns, **fields},
    ).with_head(Head("states"))


def made(spec: ModelSpec, backend: str = "auto", dtype: torch.dtype = torch.float64) -> Encoder:
    model = build(spec, seed=1, dtype=dtype, backend=backend).eval()
    assert isinstance(model, Encoder)
    return model


def ids(rows: int, count: int) -> Tensor:
    return torch.randint(VOCAB, (rows, count), generator=torch.Generator().manual_seed(2))
