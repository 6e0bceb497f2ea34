"""Families with a mixture of experts instead of the feed-forward, in all layers or in most."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from headway.models.family import BIASES, Family, grouped, partial_rotary
from headway.nn.experts import Experts
from headway.positions import Rotary

USUAL = Experts(count=8, top=2)
"""Default experts of new models; each is as wide as a feed-forward."""
SIGMOID = replace(USUAL, score="sigmoid", choice_bias=True)


def shared(fields: Mapping[str, Any], normalized: bool) -> Mapping[str, Any]:
    """Returns experts and a gated shared expert, each as wide as a feed-forward."""
    units = fields["hidden"]
    return {"experts": (replace(USUAL, normalized=normalized, shared=units, shared_gate=units > 0),)}


def _family(about: str, defaults: Mapping[str, Any], experts: Experts = USUAL, **fields: Any) -> Family:
    return grouped(about, {"experts": (experts,), **defaults}, **fields)


EXPERTS: Mapping[str, Family] = {
    "mixtral": _family(
        "mistral with experts; Mixtral 8x7B and 8x22B",
        {"norm_eps": 1e-5, "trained_context": 32768},
        theta=1e6,
    ),
    "qwen2_moe": grouped(
        "qwen2 with experts, and a gated shared expert; Qwen1.5-MoE, Qwen2-57B-A14B",
        {"qkv_bias": True, "trained_context": 32768},
        derive=partial(shared, normalized=False),
        theta=1e6,
    ),
    "qwen3_moe": _family(
        "qwen3 with experts; Qwen3-30B-A3B, 235B-A22B",
        {"qk_norm": "head", "trained_context": 40960},
        theta=1e6,
    ),
    "olmoe": _family(
        "llama with experts, and norms over all queries and keys of a token",
        {"qk_norm": "all", "norm_eps": 1e-5, "trained_context": 4096},
        replace(USUAL, normalized=False),
    ),
    "flex_olmo": _family(
        "olmo2 with experts",
        {"order": "output", "qk_norm": "all", "trained_context": 4096},
        replace(USUAL, normalized=False),
        theta=5e5,
    ),
    "granitemoe": _family("granite with experts", {}),
    "granitemoeshared": _family("granite with experts, and a shared expert", {}),
    "granitemoe_swa": _family(
        "granite_swa with experts, and with or without a shared expert", {"sink_logit": True}
    ),
    "afmoe": _family(
        "llama with norms around each sub-layer and of queries and keys, a gate, windows in three of four layers, the "
        "others without positions, and sigmoid-routed experts, some of them shared; Trinity",
        {
            "order": "sandwich",
            "qk_norm": "head",
            "gate": "channel",
            "norm_eps": 1e-5,
            "trained_context": 16384,
        },
        SIGMOID,
    ),
    "flint": _family(
        "qwen3 with sink logits, windows, no positions in layers without a window, and sigmoid-routed experts, one of "
        "them shared",
        {"qk_norm": "head", "sink_logit": True, "trained_context": 262144},
        replace(USUAL, score="sigmoid"),
    ),
    "minimax_m2": _family(
        "llama with sigmoid-routed experts, norms over all queries and keys of a token, and half of each head rotated",
        {"qk_norm": "all", "trained_context": 196608},
        SIGMOID,
        derive=partial_rotary(0.5),
    ),
    "ernie4_5_moe": _family(
        "ernie4_5 with experts, and shared experts",
        {
            "norm_eps": 1e-5,
            "positions": Rotary(5e5, pairing="adjacent"),
            "tied": True,
            "trained_context": 131072,
        },
        replace(USUAL, choice_bias=True),
    ),
    "dots1": _family(
        "qwen3 with sigmoid-routed experts, and shared experts; dots.llm1",
        {"qk_norm": "head", "trained_context": 32768},
        SIGMOID,
        theta=1e7,
    ),
    "glm4_moe": _family(
        "llama with half of each head rotated, and sigmoid-routed experts, one of them shared; GLM-4.5 to 4.7",
        {"norm_eps": 1e-5, "trained_context": 131072},
        SIGMOID,
        derive=partial_rotary(0.5),
    ),
    "exaone_moe": _family(
        "qwen3 with sigmoid-routed experts, one of them shared, and no positions in layers without a window; "
        "K-EXAONE",
        {"qk_norm": "head", "norm_eps": 1e-5, "trained_context": 262144},
        SIGMOID,
        theta=1e6,
    ),
    "solar_open": _family(
        "llama with sigmoid-routed experts, one of them shared; Solar Open 100B",
        {"norm_eps": 1e-5, "trained_context": 131072},
        SIGMOID,
        theta=1e6,
    ),
    "mellum": _family(
        "qwen3 with experts, windows per layer, and a rotary base per kind of layer; Mellum 2",
        {"qk_norm": "head", "trained_context": 131072},
        theta=5e5,
    ),
    "hy_v3": _family(
        "qwen3 with sigmoid-routed experts, one of them shared; Hy3",
        {"qk_norm": "head", "norm_eps": 1e-5, "trained_context": 131072},
        SIGMOID,
        theta=11158840.0,
    ),
    "gpt_oss": _family(
        "llama with a sink logit, biases, windows in every second layer, and experts with a clamped SwiGLU; gpt-oss",
        {
            **BIASES,
            "sink_logit": True,
            "activation": "clamped_swiglu",
            "norm_eps": 1e-5,
            "trained_context": 131072,
        },
        replace(USUAL, router_bias=True),
        theta=150000.0,
    ),
}
