"""Families that have mixers other than attention in some of their layers."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from headway.attention.delta import DeltaSpec, SSDSpec
from headway.models.expert_families import SIGMOID, USUAL, shared
from headway.models.family import Family, grouped, partial_rotary
from headway.models.mixers import Softmax
from headway.nn import ShortConv
from headway.patterns import Causal, Window
from headway.positions import NoPositions, PerLayer, Rotary


def _every(count: int, layers: int, mixer: object) -> tuple[object, ...]:
    """Returns attention in every `count`-th layer (in the last one if there are fewer layers), and `mixer` in the
    others."""
    full = [*range(count - 1, layers, count)] or [layers - 1]
    return tuple(Softmax() if i in full else mixer for i in range(layers))


def _delta(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the gated delta rule with twice as many heads as attention, of half their width, and as many key
    heads as attention has query heads; attention in every fourth layer."""
    heads, width = max(fields["heads"], 1), fields["width"]
    half = max(fields.get("head_dim", width // heads) // 2, 1)
    delta = DeltaSpec(heads=2 * heads, key_heads=heads, head_dim=half)
    return {**partial_rotary(0.25)(fields), "mixers": _every(4, fields["layers"], delta)}


def _lara(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns experts as wide as a feed-forward, the gated delta rule with as many heads as attention, and windows
    of 512."""
    heads, width, theta = max(fields["heads"], 1), fields["width"], 10000.0
    dim = max(fields.get("head_dim", width // heads), 1)
    delta = DeltaSpec(heads=heads, key_heads=max(heads // 2, 1), head_dim=dim)
    kinds = [("delta", "window", "delta", "full", "window")[i % 5] for i in range(fields["layers"])]
    rotary = Rotary(theta, pairing="halves")
    return {
        "mixers": tuple(delta if kind == "delta" else Softmax() for kind in kinds),
        "patterns": tuple(Window.last(512) if kind == "window" else Causal() for kind in kinds),
        "positions": PerLayer.of([rotary if kind == "window" else NoPositions() for kind in kinds]),
        "experts": (replace(USUAL, shared=fields["hidden"]),),
    }


def _olmo(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the gated delta rule with as many heads as attention, of 3/4 of their width, and values twice as wide
    as that."""
    heads = max(fields["heads"], 1)
    dim = max(3 * fields["width"] // (4 * heads), 1)
    sizes: dict[str, Any] = {"heads": heads, "key_heads": heads, "head_dim": dim, "value_dim": 2 * dim}
    delta = DeltaSpec(**sizes, beta_scale=2.0, norm_eps=1e-5, order="pre")
    return {"mixers": _every(4, fields["layers"], delta)}


def _conv(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"mixers": _every(3, fields["layers"], ShortConv())}


def _delta_experts(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `_delta` with experts (`shared`)."""
    return {**_delta(fields), **shared(fields, normalized=True)}


_QWEN = {"qk_norm": "head", "gate": "channel", "norm_offset": 1.0, "trained_context": 32768}
_LFM2 = {"qk_norm": "head", "norm_eps": 1e-5, "tied": True, "trained_context": 128000}


def _mamba2(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns state-space duality with the spec's heads, in every layer; the heads are together twice as wide as
    the model unless head_dim is given."""
    heads = max(fields["heads"], 1)
    wide = max(fields.get("head_dim", 2 * fields["width"] // heads), 1)
    return {"mixers": SSDSpec(heads=heads, key_heads=1, head_dim=128, value_dim=wide), "head_dim": wide}


def _ssd(count: int, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns state-space duality twice as wide as the model, with twice as many heads, and attention in every
    `count`-th layer."""
    heads = max(fields["heads"], 1)
    ssd = SSDSpec(heads=2 * heads, key_heads=1, head_dim=128, value_dim=max(fields["width"] // heads, 1))
    return {"mixers": _every(count, fields["layers"], ssd)}


def _beside(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns attention in every layer, with state-space duality of as many heads beside it, 1.5 times as wide as
    the model."""
    heads = max(fields["heads"], 1)
    wide = max(3 * fields["width"] // (2 * heads), 1)
    ssd = SSDSpec(heads=heads, key_heads=1, head_dim=256, value_dim=wide, norm=False)
    return {"mixers": Softmax(beside=ssd)}


HYBRIDS: Mapping[str, Family] = {
    "qwen3_5_text": grouped(
        "the gated delta rule in three layers of four, gated attention with a quarter of each head rotated in the "
        "fourth, norms times 1 + w; Qwen3.5's text",
        _QWEN,
        derive=_delta,
    ),
    "qwen3_next": grouped(
        "qwen3_5_text with experts, and a gated shared expert; Qwen3-Next-80B-A3B",
        _QWEN,
        derive=_delta_experts,
    ),
    "qwen3_5_moe_text": grouped(
        "qwen3_next with other matrix layouts; Qwen3.5's text with experts",
        _QWEN,
        derive=_delta_experts,
    ),
    "lara_mini": grouped(
        "the gated delta rule in two layers of five, qwen3's attention in windows in two, without positions in the "
        "fifth; experts, and a shared expert; Lara Mini",
        {"qk_norm": "head", "tied": True, "trained_context": 131072},
        derive=_lara,
    ),
    "olmo_hybrid": grouped(
        "olmo2 without positions, and the gated delta rule in three layers of four, whose layers are pre-norm; OLMo "
        "Hybrid 7B",
        {"order": "output", "qk_norm": "all", "positions": NoPositions(), "trained_context": 65536},
        derive=_olmo,
    ),
    "lfm2": grouped(
        "gated convolutions over three tokens, and attention with normed queries and keys in every third layer; LFM2",
        _LFM2,
        theta=1e6,
        derive=_conv,
    ),
    "lfm2_moe": grouped(
        "lfm2 with sigmoid-routed experts; LFM2-8B-A1B",
        {**_LFM2, "experts": (replace(SIGMOID, sum_eps=1e-6),)},
        theta=1e6,
        derive=_conv,
    ),
    "mamba2": Family(
        "layers of state-space duality alone, without feed-forward; Mamba-2",
        {"hidden": 0, "norm_eps": 1e-5, "positions": NoPositions(), "init_std": 0.1},
        derive=_mamba2,
    ),
    "bamba": grouped(
        "state-space duality, and attention with half of each head rotated in every ninth layer; Bamba",
        {"norm_eps": 1e-5, "trained_context": 262144},
        derive=lambda fields: {**partial_rotary(0.5)(fields), **_ssd(9, fields)},
    ),
    "granitemoehybrid": grouped(
        "state-space duality, and attention without positions in every tenth layer, with granite's factors; Granite 4",
        {"positions": NoPositions()},
        derive=partial(_ssd, 10),
    ),
    "falcon_h1": grouped(
        "attention and state-space duality without a norm side by side in every layer, with factors of what matrices "
        "give; Falcon-H1",
        {"norm_eps": 1e-5, "trained_context": 8192},
        theta=1e11,
        derive=_beside,
    ),
    "nemotron_h": grouped(
        "state-space duality, and attention without positions in every tenth layer; squared ReLUs without a gate, with "
        "experts or without, or no feed-forward in some layers; Nemotron-H, Nemotron 3",
        {
            "positions": NoPositions(),
            "norm_eps": 1e-5,
            "gated": False,
            "activation": "relu2",
            "tied": False,  # transformers ties no weights of this family
        },
        derive=partial(_ssd, 10),
    ),
}
