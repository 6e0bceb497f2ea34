"""The catalog as rows of a table: what each published size is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from headway.models import catalog, cost
from headway.positions import (
    Learned,
    LinearBias,
    NoPositions,
    PerLayer,
    PositionScheme,
    Relative,
    Rotary,
    Sinusoidal,
    T5Bias,
)

POSITIONS: Mapping[type[PositionScheme], str] = MappingProxyType(
    {
        NoPositions: "none",
        Learned: "absolute",
        Sinusoidal: "absolute, fixed",
        Relative: "classic relative",
        T5Bias: "bias by bucket",
        LinearBias: "ALiBi",
        Rotary: "RoPE",
        PerLayer: "by layer",
    }
)
UNITS: Mapping[str, str] = MappingProxyType(
    {
        "bert-base-chinese": "char",
        "nezha-cn-base": "char",
        "nezha-cn-large": "char",
        "wobert-chinese-base": "word",
        "wobert-chinese-plus-base": "word",
        "roformer-chinese-base": "word",
        "roformer-chinese-small": "word",
        "roformer-chinese-char-base": "char",
        "roformer-chinese-char-small": "char",
    }
)
"""What a token of the published Chinese vocabs is, most often."""
COMPARED = ("bert-base-chinese", "wobert-chinese-base", "nezha-cn-base", "roformer-chinese-base")
"""The four that Su et al. 2021, section 4.5, compare."""


def row(name: str) -> dict[str, str | int]:
    """One model of the catalog. Raises ConfigError as `catalog.spec` does.

    tokens      "char" or "word", "" where it is neither
    parameters  of all stacks; the other sizes are the decoder's where there are two
    context     the trained one
    """
    spec = catalog.spec(name)
    return {
        "name": name,
        "family": spec.family,
        "kind": spec.kind,
        "tokens": UNITS.get(name, ""),
        "positions": POSITIONS.get(type(spec.positions), type(spec.positions).__name__),
        "parameters": cost.parameter_count(spec),
        **{size: getattr(spec, size) for size in ("layers", "width", "heads", "kv_heads", "hidden", "vocab")},
        "context": spec.trained_context,
    }
