"""Decoders that differ from LLaMA, GPT-2 or GPT-NeoX by a few switches."""

from collections.abc import Mapping
from typing import Any

from headway.models.family import (
    BIASES,
    GPT2,
    LAYER_NORM,
    NEOX,
    Family,
    partial_rotary,
    scaled_embedding,
)
from headway.patterns import Causal, Pattern, Window
from headway.positions import Learned, NoPositions, PerLayer, Rotary, Sinusoidal

COHERE = {
    "norm": "layer",
    "norm_eps": 1e-5,
    "order": "joint",
    "tied": True,
    "logit_scale": 0.0625,
    "trained_context": 8192,
}
RELU2 = {"gated": False, "activation": "relu2", "trained_context": 4096}
NANOCHAT = {
    "norm_weight": False,
    "embedding_norm": True,
    "qk_norm": "head",  # behind the rotation there, which is the same without weights
    "logit_cap": 15.0,
}
GPTJ = {
    **NEOX,
    "qkv_bias": False,
    "out_bias": False,
    "output_bias": True,
    "order": "joint",
    "activation": "gelu_pytorch_tanh",
}


def _rotary_where_windows(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Windows in three of four layers, unless given; rotary positions in these, and none in the others."""
    each = given.get(
        "patterns", [Causal() if i % 4 == 3 else Window.last(4096) for i in range(given["layers"])]
    )
    each = (each,) if isinstance(each, Pattern) else tuple(each)
    rotary = Rotary(50000.0, pairing="adjacent")
    positions = PerLayer.of([NoPositions() if pattern == Causal() else rotary for pattern in each])
    return {"patterns": each, "positions": positions}


def _apertus(about: str) -> Family:
    return Family(
        about,
        {
            "qk_norm": "head",
            "gated": False,
            "activation": "xielu",
            "norm_eps": 1e-5,
            "trained_context": 65536,
        },
        theta=12e6,
        groups=True,
    )


DECODERS: Mapping[str, Family] = {
    "smollm3": Family(
        "llama without positions in every fourth layer",
        {
            "positions": PerLayer((*(Rotary(2e6, pairing="halves"),) * 3, NoPositions())),
            "tied": True,
            "trained_context": 32768,
        },
        groups=True,
    ),
    "phi3": Family(
        "llama in fused matrices, a part of each head rotated, LongRoPE; Phi-3, 3.5 and 4",
        {"norm_eps": 1e-5, "trained_context": 4096},
        groups=True,
    ),
    "glm": Family(
        "llama with half of each head rotated in adjacent pairs, and biases on queries, keys and values; GLM-4 9B",
        {"qkv_bias": True, "norm_eps": 1.5625e-7, "trained_context": 131072},
        derive=partial_rotary(0.5, "adjacent"),
        groups=True,
    ),
    "ernie4_5": Family(
        "llama in adjacent pairs, with a free head_dim; dense Ernie 4.5",
        {
            "norm_eps": 1e-5,
            "positions": Rotary(5e5, pairing="adjacent"),
            "tied": True,
            "trained_context": 131072,
        },
        groups=True,
    ),
    "helium": Family(
        "llama in adjacent pairs",
        {"norm_eps": 1e-8, "positions": Rotary(1e5, pairing="adjacent"), "trained_context": 4096},
    ),
    "cwm": Family(
        "llama with a free head_dim, and windows in three layers of four; Code World Model",
        {"norm_eps": 1e-5, "trained_context": 131072},
        theta=1e6,
        groups=True,
    ),
    "ministral3": Family(
        "mistral with queries that grow with their position",
        {
            "norm_eps": 1e-5,
            "positions": Rotary(1e6, pairing="halves", query_growth=(0.1, 16384)),
            "trained_context": 16384,
        },
        groups=True,
    ),
    "apertus": _apertus("llama with normed queries and keys, and xIELU without a gate"),
    "apertus1p5_text": _apertus(
        "apertus with ids of images and sounds, whose outputs are there; Apertus 1.5's text"
    ),
    "exaone": Family(
        "llama under names like gpt2's; EXAONE 3 and 3.5",
        {"norm_eps": 1e-5, "trained_context": 4096},
        theta=5e5,
        groups=True,
    ),
    "seed_oss": Family(
        "llama with biases on queries, keys and values, and a free head_dim",
        {"qkv_bias": True, "trained_context": 524288},
        theta=1e7,
        groups=True,
    ),
    "internlm3": Family(
        "llama under another name", {"norm_eps": 1e-5, "trained_context": 32768}, groups=True
    ),
    "iquestcoder": Family(
        "llama under another name", {"norm_eps": 1e-5, "trained_context": 131072}, groups=True
    ),
    "cohere": Family(
        "attention and gated feed-forward side by side behind one LayerNorm, no biases, adjacent pairs, scaled logits",
        {**COHERE, "positions": Rotary(5e5, pairing="adjacent")},
        groups=True,
    ),
    "cohere2": Family(
        "cohere with windows in three of four layers, and no positions in the fourth",
        COHERE,
        derive=_rotary_where_windows,
        groups=True,
    ),
    "stablelm": Family(
        "llama with LayerNorm, and a quarter of each head rotated",
        {**LAYER_NORM, "norm_eps": 1e-5, "trained_context": 4096},
        derive=partial_rotary(0.25),
        groups=True,
    ),
    "arcee": Family("llama with ReLU squared and no gate", {**RELU2, "norm_eps": 1e-5}, groups=True),
    "nemotron": Family(
        "arcee with LayerNorm times 1 + w, and half of each head rotated",
        {**RELU2, **LAYER_NORM, "norm_eps": 1e-5, "norm_offset": 1.0, "init_std": 0.0134},
        derive=partial_rotary(0.5),
        groups=True,
    ),
    "jais2": Family(
        "arcee with LayerNorm, and biases everywhere",
        {**RELU2, **LAYER_NORM, **BIASES, "norm_eps": 1e-5, "trained_context": 8192},
    ),
    "persimmon": Family(
        "jais2 with LayerNorm on queries and keys, too, and half of each head rotated",
        {**RELU2, **LAYER_NORM, **BIASES, "norm_eps": 1e-5, "qk_norm": "head", "trained_context": 16384},
        derive=partial_rotary(0.5),
    ),
    "nanochat": Family(
        "arcee with norms without weights, one behind the embedding, normed queries and keys, and capped logits",
        {**RELU2, **NANOCHAT, "trained_context": 2048},
    ),
    "gptj": Family(
        "a part of each head rotated in adjacent pairs, attention and feed-forward side by side behind one LayerNorm",
        GPTJ,
        derive=partial_rotary(0.25, "adjacent"),
    ),
    "codegen": Family(
        "gptj with one matrix for queries, values and keys",
        GPTJ,
        derive=partial_rotary(0.5, "adjacent"),
    ),
    "gpt_neo": Family(
        "gpt2 with windows by layer, unscaled scores, and no biases on queries, keys and values",
        {
            **GPT2,
            "qkv_bias": False,
            "attention_scale": 1.0,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "positions": Learned(2048),
            "trained_context": 2048,
        },
    ),
    "openai-gpt": Family(
        "gpt2 with its norms behind, and none at the end",
        {
            **GPT2,
            "order": "post",
            "final_norm": False,
            "positions": Learned(512),
            "trained_context": 512,
        },
    ),
    "opt": Family(
        "gpt2 with ReLU, and positions from 2 on",
        {
            **NEOX,
            "activation": "relu",
            "tied": True,
            "dropout": 0.1,
            "positions": Learned(2048, offset=2),
            "trained_context": 2048,
        },
    ),
    "ctrl": Family(
        "gpt2 with sinusoidal positions, scaled embeddings, ReLU, and a bias of the output",
        {
            **NEOX,
            "norm_eps": 1e-6,
            "positions": Sinusoidal(pairing="halves"),
            "activation": "relu",
            "output_bias": True,
            "tied": True,
            "dropout": 0.1,
            "trained_context": 256,
        },
        derive=scaled_embedding,
    ),
    "xglm": Family(
        "gpt2 with sinusoidal positions from 2 on, and scaled embeddings",
        {
            **NEOX,
            "positions": Sinusoidal(pairing="halves", closed=True, first=2),
            "activation": "gelu",
            "tied": True,
            "dropout": 0.1,
            "attention_dropout": 0.1,
            "trained_context": 2048,
        },
        derive=scaled_embedding,
    ),
    "biogpt": Family(
        "gpt2 with scaled embeddings, and positions from 2 on",
        {
            **NEOX,
            "activation": "gelu",
            "tied": True,
            "dropout": 0.1,
            "attention_dropout": 0.1,
            "positions": Learned(1024, offset=2),
            "trained_context": 1024,
        },
        derive=scaled_embedding,
    ),
}
