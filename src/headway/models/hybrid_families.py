"""Families that mix tokens otherwise than by attention in some of their layers."""

from collections.abc import Mapping
from typing import Any

from headway.attention.delta import DeltaSpec
from headway.models.family import Family, partial_rotary
from headway.models.mixers import Softmax
from headway.nn import ShortConv


def _every(count: int, layers: int, mixer: object) -> tuple[object, ...]:
    """`mixer`, and attention in every `count`-th layer, or in the last where there are fewer."""
    full = [*range(count - 1, layers, count)] or [layers - 1]
    return tuple(Softmax() if i in full else mixer for i in range(layers))


def _delta(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The gated delta rule of twice as many heads, of half their size, with as many keys as attention has queries."""
    heads, width = max(given["heads"], 1), given["width"]
    half = max(given.get("head_dim", width // heads) // 2, 1)
    delta = DeltaSpec(heads=2 * heads, key_heads=heads, head_dim=half)
    return {**partial_rotary(0.25)(given), "mixers": _every(4, given["layers"], delta)}


HYBRIDS: Mapping[str, Family] = {
    "qwen3_5_text": Family(
        "the gated delta rule in three layers of four, gated attention with a quarter of each head rotated in the "
        "fourth, norms times 1 + w; Qwen3.5's text",
        {"qk_norm": "head", "gate": "channel", "norm_offset": 1.0, "trained_context": 32768},
        theta=1e4,
        derive=_delta,
        groups=True,
    ),
    "lfm2": Family(
        "gated convolutions over three tokens, and attention with normed queries and keys in every third layer; LFM2",
        {"qk_norm": "head", "norm_eps": 1e-5, "tied": True, "trained_context": 128000},
        theta=1e6,
        derive=lambda given: {"mixers": _every(3, given["layers"], ShortConv())},
        groups=True,
    ),
}
