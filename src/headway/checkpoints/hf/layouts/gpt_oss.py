"""gpt-oss as `transformers` stores it (OpenAI 2025): biases everywhere, a sink logit, windows in every second layer.
All experts of a layer are two tensors, with matrices [in, out]."""

from collections.abc import Mapping
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader, Key
from headway.checkpoints.hf.layer_types import UNUSED, every, read_kinds, read_windows, window_keys
from headway.checkpoints.hf.layouts.experts import ExpertKeys, expert_layout, renamed, stacked
from headway.checkpoints.hf.layouts.rules import Rule
from headway.checkpoints.hf.rope import TRAINED, read_rope
from headway.models import ModelSpec

YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN |= {TRAINED: 4096}
"""Positions where a config has no key of them."""


def _read(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    layers, rope = fields["layers"], dict[str, Any]()
    if given.get("rope_parameters") is None and given.get("rope_scaling") is None:
        usual = ConfigReader({**given.config, "rope_parameters": YARN}, given.defaults)
        rope = read_rope(usual, fields["head_dim"])
    return {**rope, "patterns": read_windows(given, read_kinds(given, layers, every(2, 1)))}


def _experts(spec: ModelSpec) -> list[Rule]:
    gate_up, down = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    leaves = {"weight": "", "bias": "_bias"}
    return stacked(
        spec,
        {leaf: f"{gate_up}{end}" for leaf, end in leaves.items()},
        {leaf: f"{down}{end}" for leaf, end in leaves.items()},
        turned=True,
    )


GPT_OSS = expert_layout(
    *("gpt_oss", "GptOssForCausalLM", "layer", 131072),
    dict.fromkeys(("qkv_bias", "out_bias"), Key("attention_bias", True)),
    ExpertKeys(
        count=("num_local_experts", "num_experts"),
        hidden="intermediate_size",
        always={"router_bias": True},
        aux=0.001,
    ),
    kv_heads=8,
    head_dim=Key("head_dim", 64),
    without=("activation",),
    more={"rope_theta": 150000.0, "sliding_window": 128},
    only={"hidden_act": ("silu",), "swiglu_alpha": (1.702, None), "swiglu_limit": (7.0, None)},
    harmless=("experts_per_token", "initial_context_length"),  # of OpenAI's own code
    read=_read,
    write=lambda spec: window_keys(spec, UNUSED),
    tensors=renamed({".mlp.gate.": ".mlp.router.", ".sink_logit": ".sinks"}, _experts),
)
