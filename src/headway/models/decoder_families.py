"""Decoder families that differ from LLaMA, GPT-2 or GPT-NeoX in a few settings."""

from collections.abc import Mapping
from typing import Any

from headway.models.family import (
    BIASES,
    GPT2,
    LAYER_NORM,
    NEOX,
    Family,
    grouped,
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
    "qk_norm": "head",  # in nanochat after the rotation, which is equivalent without weights
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
APERTUS = {
    "qk_norm": "head",
    "gated": False,
    "activation": "xielu",
    "norm_eps": 1e-5,
    "trained_context": 65536,
}


def _rotary_where_windows(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns windows in three of four layers, unless patterns are given; rotary positions in layers with windows,
    and none in the others."""
    each = fields.get(
        "patterns", [Causal() if i % 4 == 3 else Window.last(4096) for i in range(fields["layers"])]
    )
    each = (each,) if isinstance(each, Pattern) else tuple(each)
    rotary = Rotary(50000.0, pairing="adjacent")
    positions = PerLayer.of([NoPositions() if pattern == Causal() else rotary for pattern in each])
    return {"patterns": each, "positions": positions}


DECODERS: Mapping[str, Family] = {
    "smollm3": grouped(
        "llama without positions in every fourth layer",
        {
            "positions": PerLayer((*(Rotary(2e6, pairing="halves"),) * 3, NoPositions())),
            "tied": True,
            "trained_context": 32768,
        },
    ),
    "phi3": grouped(
        "llama with fused matrices, a part of each head rotated, LongRoPE; Phi-3, 3.5 and 4",
        {"norm_eps": 1e-5, "trained_context": 4096},
    ),
    "glm": grouped(
        "llama with half of each head rotated in adjacent pairs, and biases on queries, keys and values; GLM-4 9B",
        {"qkv_bias": True, "norm_eps": 1.5625e-7, "trained_context": 131072},
        derive=partial_rotary(0.5, "adjacent"),
    ),
    "ernie4_5": grouped(
        "llama with adjacent rotary pairs, with a free head_dim; dense Ernie 4.5",
        {
            "norm_eps": 1e-5,
            "positions": Rotary(5e5, pairing="adjacent"),
            "tied": True,
            "trained_context": 131072,
        },
    ),
    "helium": Family(
        "llama with adjacent rotary pairs",
        {"norm_eps": 1e-8, "positions": Rotary(1e5, pairing="adjacent"), "trained_context": 4096},
    ),
    "cwm": grouped(
        "llama with a free head_dim, and windows in three layers of four; Code World Model",
        {"norm_eps": 1e-5, "trained_context": 131072},
        theta=1e6,
    ),
    "ministral3": grouped(
        "mistral with queries scaled by position",
        {
            "norm_eps": 1e-5,
            "positions": Rotary(1e6, pairing="halves", query_growth=(0.1, 16384)),
            "trained_context": 16384,
        },
    ),
    "apertus": grouped("llama with normed queries and keys, and xIELU without a gate", APERTUS, theta=12e6),
    "apertus1p5_text": grouped(
        "apertus with token ids for images and sound in its vocabulary; Apertus 1.5's text",
        APERTUS,
        theta=12e6,
    ),
    "exaone": grouped(
        "llama with tensor names like gpt2's; EXAONE 3 and 3.5",
        {"norm_eps": 1e-5, "trained_context": 4096},
        theta=5e5,
    ),
    "seed_oss": grouped(
        "llama with biases on queries, keys and values, and a free head_dim",
        {"qkv_bias": True, "trained_context": 524288},
        theta=1e7,
    ),
    "internlm3": grouped("the same model as llama", {"norm_eps": 1e-5, "trained_context": 32768}),
    "iquestcoder": grouped("the same model as llama", {"norm_eps": 1e-5, "trained_context": 131072}),
    "cohere": grouped(
        "attention and gated feed-forward in parallel after one LayerNorm, no biases, adjacent rotary pairs, "
        "scaled logits",
        {**COHERE, "positions": Rotary(5e5, pairing="adjacent")},
    ),
    "cohere2": grouped(
        "cohere with windows in three of four layers, and no positions in the fourth",
        COHERE,
        derive=_rotary_where_windows,
    ),
    "stablelm": grouped(
        "llama with LayerNorm, and a quarter of each head rotated",
        {**LAYER_NORM, "norm_eps": 1e-5, "trained_context": 4096},
        derive=partial_rotary(0.25),
    ),
    "arcee": grouped("llama with ReLU squared and no gate", {**RELU2, "norm_eps": 1e-5}),
    "nemotron": grouped(
        "arcee with LayerNorm times 1 + w, and half of each head rotated",
        {**RELU2, **LAYER_NORM, "norm_eps": 1e-5, "norm_offset": 1.0, "init_std": 0.0134},
        derive=partial_rotary(0.5),
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
        "arcee with norms without weights, one after the embedding, normed queries and keys, and capped logits",
        {**RELU2, **NANOCHAT, "trained_context": 2048},
    ),
    "gptj": Family(
        "a part of each head rotated in adjacent pairs, attention and feed-forward in parallel after one LayerNorm",
        GPTJ,
        derive=partial_rotary(0.25, "adjacent"),
    ),
    "codegen": Family(
        "gptj with one matrix for queries, values and keys",
        GPTJ,
        derive=partial_rotary(0.5, "adjacent"),
    ),
    "gpt_neo": Family(
        "gpt2 with windows per layer, unscaled scores, and no biases on queries, keys and values",
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
        "gpt2 in post-norm order, without a last norm",
        {
            **GPT2,
            "order": "post",
            "final_norm": False,
            "positions": Learned(512),
            "trained_context": 512,
        },
    ),
    "opt": Family(
        "gpt2 with ReLU, and positions that start at 2",
        {
            **GPT2,
            "activation": "relu",
            "attention_dropout": 0.0,
            "positions": Learned(2048, offset=2),
            "trained_context": 2048,
        },
    ),
    "ctrl": Family(
        "gpt2 with sinusoidal positions, scaled embeddings, ReLU, and an output bias",
        {
            **GPT2,
            "norm_eps": 1e-6,
            "positions": Sinusoidal(pairing="halves"),
            "activation": "relu",
            "output_bias": True,
            "attention_dropout": 0.0,
            "trained_context": 256,
        },
        derive=scaled_embedding,
    ),
    "xglm": Family(
        "gpt2 with sinusoidal positions that start at 2, and scaled embeddings",
        {
            **GPT2,
            "positions": Sinusoidal(pairing="halves", closed=True, first=2),
            "activation": "gelu",
            "trained_context": 2048,
        },
        derive=scaled_embedding,
    ),
    "biogpt": Family(
        "gpt2 with scaled embeddings, and positions that start at 2",
        {**GPT2, "activation": "gelu", "positions": Learned(1024, offset=2)},
        derive=scaled_embedding,
    ),
}
