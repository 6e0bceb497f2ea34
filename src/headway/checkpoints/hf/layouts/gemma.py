"""Gemma 1, 2 and 3 (text), and VaultGemma, as `transformers` stores them; tensors have our own names, but for one norm
of VaultGemma (Gemma team 2024, 2024, 2025; VaultGemma team 2025).

Norms are x / |x| * (1 + w) with w stored, embeddings are times sqrt(M), the activation is GELU by tanh. Gemma 2 norms
what sub-layers are given and give, caps scores and logits, and has a window in every other layer; VaultGemma norms
what they are given alone; Gemma 3 norms queries and keys instead of the caps, and has a window, and a base of its own,
in five layers of six.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.checkpoints.hf.config_keys import DECODER, ConfigReader, Inexpressible, Key
from headway.checkpoints.hf.layer_types import (
    FULL,
    SLIDING,
    UNUSED,
    every,
    read_kinds,
    read_rope_by_kind,
    read_windows,
    window_keys,
    write_by_kind,
)
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.tensors import OWN_NAMES, renamed_own
from headway.models import ModelSpec
from headway.models.family import scaled_embedding

CAUSAL = {"use_bidirectional_attention": (False, None)}
BASES = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
PERIOD = "sliding_window_pattern"


def gemma_keys(activation: str, kv_heads: int) -> dict[str, Key]:
    """The keys that all Gemmas share."""
    return {
        **DECODER,
        "kv_heads": Key("num_key_value_heads", kv_heads),
        "head_dim": Key("head_dim", 256),
        "activation": Key(activation, "gelu_pytorch_tanh"),
        "norm_eps": Key("rms_norm_eps", 1e-6),
        "tied": Key("tie_word_embeddings", True),
        "qkv_bias": Key("attention_bias"),
        "out_bias": Key("attention_bias"),
    }


def _read_scale(given: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Scores are over the root of query_pre_attn_scalar, which is the size of a head in most models."""
    number = given.whole("query_pre_attn_scalar")
    return {"attention_scale": None if number == fields["head_dim"] else number**-0.5}


def _write_scale(spec: ModelSpec) -> dict[str, Any]:
    scale = spec.attention_scale
    number = spec.head_dim if scale is None else round(scale**-2)
    if scale is not None and number**-0.5 != scale:
        raise Inexpressible("attention_scale")
    return {"query_pre_attn_scalar": number}


def _read2(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    kinds = read_kinds(given, fields["layers"], every(2, 1))
    return {"patterns": read_windows(given, kinds), **scaled_embedding(fields), **_read_scale(given, fields)}


def _read3(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    kinds = read_kinds(given, fields["layers"], every(given.whole(PERIOD, 6), -1))
    return {
        "patterns": read_windows(given, kinds),
        **read_rope_by_kind(given, kinds, fields["head_dim"], BASES),
        **scaled_embedding(fields),
        **_read_scale(given, fields),
    }


CAPS = {
    "score_cap": Key("attn_logit_softcapping", 50.0),
    "logit_cap": Key("final_logit_softcapping", 30.0),
}
NO_CAPS = {field: key._replace(default=None) for field, key in CAPS.items()}
WINDOWS = {"query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None}
GEMMA = Layout(
    family="gemma",
    architectures={"GemmaForCausalLM": "lm"},
    keys=gemma_keys("hidden_act", 16),
    more={"max_position_embeddings": 8192},
    only={**CAUSAL, "hidden_activation": ("gelu_pytorch_tanh", None)},
    rope="",
    # their first files say "gelu", and mean the one by tanh
    read=lambda given, kind, fields: {
        **scaled_embedding(fields),
        **({"activation": "gelu_pytorch_tanh"} if fields["activation"] == "gelu" else {}),
    },
    tensors=OWN_NAMES,
)
GEMMA2 = Layout(
    family="gemma2",
    architectures={"Gemma2ForCausalLM": "lm"},
    keys={**gemma_keys("hidden_activation", 4), **CAPS},
    more={"max_position_embeddings": 8192, **WINDOWS},
    only={**CAUSAL, "hidden_act": ("gelu_pytorch_tanh", None)},
    harmless=("cache_implementation",),
    rope="",
    read=_read2,
    write=lambda spec: {**window_keys(spec, UNUSED), **_write_scale(spec)},
    tensors=OWN_NAMES,
)
VAULTGEMMA = replace(
    GEMMA2,
    family="vaultgemma",
    architectures={"VaultGemmaForCausalLM": "lm"},
    only={},
    tensors=renamed_own({"post_attention_layernorm": "pre_feedforward_layernorm"}),
)
GEMMA3 = Layout(
    family="gemma3_text",
    architectures={"Gemma3ForCausalLM": "lm"},
    keys={**gemma_keys("hidden_activation", 4), **NO_CAPS},
    more={
        "max_position_embeddings": 131072,
        **WINDOWS,
        **dict.fromkeys(("rope_parameters", "rope_theta", "rope_local_base_freq", "rope_scaling", PERIOD)),
    },
    only=CAUSAL,
    harmless=("cache_implementation", "_sliding_window_pattern"),
    read=_read3,
    write=lambda spec: {**write_by_kind(spec, BASES), **_write_scale(spec)},
    tensors=OWN_NAMES,
)
