"""Mixtures of experts that are LLaMA, Mistral, Qwen or OLMo with experts, as `transformers` stores them.

Mixtral (Jiang et al. 2024), Qwen1.5-MoE and Qwen2-MoE (Qwen team 2024), Qwen3-MoE (Yang et al. 2025), OLMoE
(Muennighoff et al. 2024), FlexOlmo (Shi et al. 2025), MiniMax-M2 (MiniMax 2025). Files have matrices of each expert,
under our names or Mixtral's.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader, Key
from headway.checkpoints.hf.layer_types import FULL
from headway.checkpoints.hf.layouts.experts import STEPS, ExpertKeys, expert_layout, renamed
from headway.checkpoints.hf.layouts.llama import BIAS, FREE, NONE
from headway.checkpoints.hf.layouts.olmo import KEYS as OLMO
from headway.checkpoints.hf.rope import PARTIAL
from headway.errors import ConfigError

NORMALIZED = {"normalized": "norm_topk_prob"}
W = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
MIXTRAL = expert_layout(
    *("mixtral", "MixtralForCausalLM", "all", 131072, NONE),
    ExpertKeys(count=("num_local_experts", "num_experts"), hidden="intermediate_size", aux=0.001),
    kv_heads=8,
    more={"rope_theta": 1e6, "sliding_window": None},
    only={"router_jitter_noise": (0.0, None)},
    tensors=renamed(W),
)


def _full(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """No field: whether layers have windows, which are read elsewhere as they are not here."""
    kinds = given.get("layer_types")
    if kinds is not None and kinds != [FULL] * fields["layers"]:
        raise given.wrong("layer_types", f"{FULL} in every layer, as use_sliding_window is false", kinds)
    return {}


WINDOWS = ("sliding_window", "max_window_layers")
"""Keys that change nothing where use_sliding_window is false, which it must be."""
QWEN2_MOE = expert_layout(
    *("qwen2_moe", "Qwen2MoeForCausalLM", "none", 32768),
    {"qkv_bias": Key("qkv_bias", True)},
    ExpertKeys(
        shared="shared_expert_intermediate_size",
        others=NORMALIZED,
        always={"shared_gate": True},
        sparse=STEPS,
        aux=0.001,
    ),
    kv_heads=16,
    head_dim=FREE,
    harmless=WINDOWS,
    read=_full,
)
QWEN3_MOE = expert_layout(
    *("qwen3_moe", "Qwen3MoeForCausalLM", "none", 32768, BIAS),
    ExpertKeys(others=NORMALIZED, sparse=STEPS, aux=0.001),
    kv_heads=4,
    harmless=WINDOWS,
    read=_full,
)
OLMOE = expert_layout(
    *("olmoe", "OlmoeForCausalLM", "none", 4096, OLMO),
    ExpertKeys(hidden="intermediate_size", others=NORMALIZED, aux=0.01),
    heads_divide=True,
    only={"clip_qkv": (None,)},
)
FLEX_OLMO = expert_layout(
    *("flex_olmo", "FlexOlmoForCausalLM", "none", 4096),
    {**OLMO, "norm_eps": Key("rms_norm_eps", 1e-6)},
    ExpertKeys(hidden="intermediate_size", others=NORMALIZED, aux=0.01),
    more={"rope_theta": 5e5},
)


def _read_minimax(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Old files say how many dims of a head are rotated, and not which share."""
    rotary, nested = fields["positions"], given.get("rope_parameters") or {}
    if given.get("rotary_dim") is None:
        return {}
    dims = given.whole("rotary_dim")
    if PARTIAL not in {*given.config, *nested}:
        return {"positions": replace(rotary, dims=dims)}
    if dims != (rotary.dims or fields["head_dim"]):
        raise ConfigError(
            f"config.json: rotary_dim is {dims}, but {PARTIAL} makes it {rotary.dims}; drop one"
        )
    return {}


MINIMAX_M2 = expert_layout(
    *("minimax_m2", "MiniMaxM2ForCausalLM", "none", 196608, NONE),
    ExpertKeys(
        count=("num_local_experts", "num_experts"),
        hidden="intermediate_size",
        always={"score": "sigmoid", "choice_bias": True},
        aux=0.001,
    ),
    kv_heads=8,
    head_dim=Key("head_dim", 128),
    more={"rope_theta": 5e6, PARTIAL: 1.0, "rotary_dim": None},
    only={"router_jitter_noise": (0.0, None)},
    rope=PARTIAL,
    read=_read_minimax,
    tensors=renamed({".gate.e_score_": ".e_score_", **W}),
)
