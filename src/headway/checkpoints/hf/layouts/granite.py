"""Granite 3 as `transformers` stores it (IBM 2024): LLaMA with four factors; tensors have our own names."""

from collections.abc import Mapping
from typing import Any

from headway.checkpoints.hf.config_keys import DECODER, ConfigReader, Key, per_head, same_heads
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.tensors import OWN_NAMES
from headway.models import ModelSpec


def _read(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    divisor, factor = given.number("logits_scaling"), given.number("attention_multiplier")
    if not divisor:
        raise given.wrong("logits_scaling", "a number above 0", divisor)
    return {
        "logit_scale": 1 / divisor,
        "attention_scale": None if factor == fields["head_dim"] ** -0.5 else factor,
    }


def _write(spec: ModelSpec) -> dict[str, Any]:
    factor = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
    divisor = 1 / spec.logit_scale
    near = max(round(divisor), 1)
    divisor = near if 1 / near == spec.logit_scale else divisor
    return {"logits_scaling": float(divisor), "attention_multiplier": factor}


GRANITE = Layout(
    family="granite",
    architectures={"GraniteForCausalLM": "lm"},
    keys={
        **DECODER,
        "kv_heads": Key("num_key_value_heads", same_heads),
        "head_dim": Key("head_dim", per_head, written=False),
        "activation": Key("hidden_act", "silu"),
        "norm_eps": Key("rms_norm_eps", 1e-6),
        "qkv_bias": Key("attention_bias"),
        "out_bias": Key("attention_bias"),
        "mlp_bias": Key("mlp_bias"),
        "embedding_scale": Key("embedding_multiplier", 1.0),
        "residual_scale": Key("residual_multiplier", 1.0),
    },
    more={"max_position_embeddings": 2048, "logits_scaling": 1.0, "attention_multiplier": 1.0},
    rope="",
    read=_read,
    write=_write,
    tensors=OWN_NAMES,
)
