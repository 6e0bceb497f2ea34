"""Families that differ from LLaMA in where their norms are and what they multiply by, and by factors and caps."""

from collections.abc import Mapping
from functools import partial

from headway.models.family import Family, grouped, partial_rotary, scaled_embedding
from headway.models.mixers import Softmax
from headway.nn.altup import AltUp

_OLMO = {"order": "output", "qk_norm": "all", "norm_eps": 1e-5, "trained_context": 4096}
_GEMMA = {"norm_offset": 1.0, "activation": "gelu_pytorch_tanh", "tied": True, "trained_context": 8192}
_olmo = partial(grouped, defaults=_OLMO, theta=5e5)
_gemma = partial(grouped, derive=scaled_embedding)

NORMED: Mapping[str, Family] = {
    "granite": grouped("llama with factors on embeddings, scores, logits and what is added"),
    "hyperclovax": grouped("granite with a norm on each sub-layer's output, too", {"order": "sandwich"}),
    "granite_swa": grouped(
        "granite with windows in three of four layers, sink logits, and a rotary base per layer",
        {"norm_eps": 1e-5, "sink_logit": True, "tied": True, "trained_context": 8192},
    ),
    "hunyuan_v1_dense": grouped(
        "llama with norms of queries and keys after their rotation",
        {"qk_norm": "rotated", "norm_eps": 1e-5},
    ),
    "olmo": grouped(
        "llama with LayerNorm without weights",
        {"norm": "layer", "norm_weight": False, "norm_eps": 1e-5},
    ),
    "olmo2": _olmo(
        "llama with norms on the outputs of sub-layers, and over all queries and all keys of a token"
    ),
    "olmo3": _olmo("olmo2 with windows by layer"),
    "exaone4": grouped(
        "llama with norms only on the outputs of sub-layers, normed queries and keys, and windows per layer",
        {"order": "output", "qk_norm": "head", "norm_eps": 1e-5},
    ),
    "glm4": grouped(
        "glm with a norm on each sub-layer's output, too; GLM-4 0414",
        {"order": "sandwich", "norm_eps": 1.5625e-7, "qkv_bias": True, "trained_context": 131072},
        derive=partial_rotary(0.5, "adjacent"),
    ),
    "gemma": _gemma("llama with norms times 1 + w, scaled embeddings, and GELU", _GEMMA),
    "gemma2": _gemma(
        "gemma with a norm on each sub-layer's output, too, capped scores and logits, and windows per layer",
        {**_GEMMA, "order": "sandwich", "score_cap": 50.0, "logit_cap": 30.0},
    ),
    "vaultgemma": _gemma(
        "gemma with capped scores and logits, and windows per layer",
        {**_GEMMA, "score_cap": 50.0, "logit_cap": 30.0},
    ),
    "gemma3_text": _gemma(
        "gemma2 with normed queries and keys instead of caps, and a rotary base per kind of layer; Gemma 3's text",
        {**_GEMMA, "order": "sandwich", "qk_norm": "head", "trained_context": 32768},
        theta=1e6,
    ),
    "gemma3n_text": _gemma(
        "gemma3_text with norms times w, normed values, unscaled scores, capped logits, keys shared across layers, "
        "per-layer embeddings, four residual streams, a low-rank branch beside attention, and sparse gates; "
        "Gemma 3n's text",
        {
            **_GEMMA,
            "norm_offset": 0.0,
            "order": "sandwich",
            "qk_norm": "head",
            "attention_scale": 1.0,
            "logit_cap": 30.0,
            "mixers": (Softmax(v_norm=True),),
            "altup": AltUp(),
            "per_layer_embedding": 256,
            "laurel": 64,
            "trained_context": 32768,
        },
        theta=1e6,
    ),
    "gemma4_text": _gemma(
        "gemma3_text with norms times w, normed values, unscaled scores, a factor per layer, keys shared across "
        "layers, per-layer heads and embeddings; Gemma 4's text without experts",
        {
            **_GEMMA,
            "norm_offset": 0.0,
            "order": "sandwich",
            "qk_norm": "head",
            "attention_scale": 1.0,
            "layer_scalar": True,
            "mixers": (Softmax(v_norm=True),),
            "trained_context": 131072,
        },
        theta=1e6,
    ),
}
