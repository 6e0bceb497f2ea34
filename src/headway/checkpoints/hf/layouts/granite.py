"""Granite 3 as `transformers` stores it (IBM 2024): LLaMA with four factors; tensors have our own names."""

from collections.abc import Mapping
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader, Key
from headway.checkpoints.hf.layouts.llama import BIAS, FREE, MLP_BIAS, llama_layout, read_windows
from headway.models import ModelSpec


def _read(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    divisor, factor = given.number("logits_scaling"), given.number("attention_multiplier")
    if not divisor:
        raise given.wrong("logits_scaling", "a number above 0", divisor)
    return {
        "patterns": read_windows(given, "none", fields["layers"]),
        "logit_scale": 1 / divisor,
        "attention_scale": None if factor == fields["head_dim"] ** -0.5 else factor,
    }


def _write(spec: ModelSpec) -> dict[str, Any]:
    factor = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
    divisor = 1 / spec.logit_scale
    near = max(round(divisor), 1)
    divisor = near if 1 / near == spec.logit_scale else divisor
    return {"logits_scaling": float(divisor), "attention_multiplier": factor}


GRANITE = llama_layout(
    *("granite", "GraniteForCausalLM", "none", 2048),
    {
        **BIAS,
        **MLP_BIAS,
        "norm_eps": Key("rms_norm_eps", 1e-6),
        "embedding_scale": Key("embedding_multiplier", 1.0),
        "residual_scale": Key("residual_multiplier", 1.0),
    },
    head_dim=FREE,
    more={"logits_scaling": 1.0, "attention_multiplier": 1.0},
    read=_read,
    write=_write,
)
