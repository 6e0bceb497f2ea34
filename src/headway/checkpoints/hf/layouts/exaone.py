"""EXAONE 3 and 3.5 as `transformers` stores them from 5.24 on (LG AI Research 2024): LLaMA under names like GPT-2's.

Published files, whose models were code of their own before, have three keys under older names."""

from collections.abc import Mapping
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader
from headway.checkpoints.hf.layouts.base import Part
from headway.checkpoints.hf.layouts.llama import BIAS, MLP_BIAS, llama_layout
from headway.checkpoints.hf.layouts.llama_kin import REMOTE
from headway.checkpoints.hf.layouts.rules import block, decoder_names
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.patterns import Causal

OLDER = {
    "layers": ("num_hidden_layers", "num_layers"),
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon"),
    "activation": ("hidden_act", "activation_function"),
}
"""Fields, and the names of their keys, today's first."""


def _read(given: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    at = {}
    for field, (new, old) in OLDER.items():
        at[field] = old if given.get(new) is None else new
        if given.get(old) not in (None, given.get(at[field])):
            raise ConfigError(
                f"config.json: {new} is {given.get(new)} and {old} {given.get(old)}, and both are one number; drop one"
            )
    return {
        "layers": given.whole(at["layers"]),
        "norm_eps": given.number(at["norm_eps"], 1e-5),
        "activation": given.text(at["activation"], "silu"),
        "patterns": Causal(),
    }


def _write(spec: ModelSpec) -> dict[str, Any]:
    return {new: getattr(spec, field) for field, (new, _) in OLDER.items()}


EXAONE = llama_layout(
    *("exaone", "LlamaForCausalLM", None, 4096),
    {**BIAS, **MLP_BIAS},
    kv_heads=8,
    without=tuple(OLDER),
    more={"rope_theta": 5e5},
    only={"embed_dropout": (0.0, None)},
    harmless=REMOTE,
    parts=(Part(dict.fromkeys(name for pair in OLDER.values() for name in pair), _read, _write),),
    tensors=decoder_names(
        "transformer.",
        "transformer.wte",
        "transformer.ln_f",
        "transformer.h.#.",
        block("ln_1 ln_2", "attn.attention. q_proj k_proj v_proj out_proj", "mlp. c_fc_0 c_fc_1 c_proj"),
    ),
)
