"""Mixtures of experts that are LLaMA, Mistral, Qwen or OLMo with experts, as `transformers` stores them.

Mixtral (Jiang et al. 2024), Qwen1.5-MoE and Qwen2-MoE (Qwen team 2024), Qwen3-MoE (Yang et al. 2025), OLMoE
(Muennighoff et al. 2024), FlexOlmo (Shi et al. 2025), MiniMax-M2 (MiniMax 2025). Files have matrices of each expert,
under our names or Mixtral's; gpt-oss (OpenAI 2025), with biases everywhere, attention sinks, and windows in every
second layer, has all experts of a layer in two tensors, with matrices [in, out]. In AFMoE (Arcee 2025, Trinity), with a
gate on the attention output, and Flint (RecursiveSI 2026), with attention sinks, layers with windows have rotary
positions, and layers with full attention have none.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader, Key
from headway.checkpoints.hf.layouts.base import Part
from headway.checkpoints.hf.layouts.experts import (
    NORMALIZED,
    STEPS,
    ExpertKeys,
    behind_first,
    stacked,
)
from headway.checkpoints.hf.layouts.llama import BIAS, FREE, llama_layout
from headway.checkpoints.hf.layouts.llama_kin import REMOTE
from headway.checkpoints.hf.layouts.mixtures_kin import SHARED, SIGMOID
from headway.checkpoints.hf.layouts.olmo import KEYS as OLMO
from headway.checkpoints.hf.layouts.parts import IN_WINDOWS, scaled_embedding, windows
from headway.checkpoints.hf.layouts.tensors import renamed
from headway.checkpoints.hf.rope import PARTIAL, TRAINED, read_rope
from headway.checkpoints.hf.windows import FULL, SLIDING, UNUSED, every
from headway.errors import ConfigError

W = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
MIXTRAL = llama_layout(
    *("mixtral", "MixtralForCausalLM", "all", 131072),
    experts=ExpertKeys(count=("num_local_experts", "num_experts"), hidden="intermediate_size", aux=0.001),
    kv_heads=8,
    more={"rope_theta": 1e6, "sliding_window": None},
    only={"router_jitter_noise": (0.0, None)},
    tensors=renamed(W),
)


def _full(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads no field; raises ConfigError unless `layer_types`, if present, has full attention in all layers."""
    kinds = config.get("layer_types")
    if kinds is not None and kinds != [FULL] * fields["layers"]:
        raise config.wrong("layer_types", f"{FULL} in every layer, as use_sliding_window is false", kinds)
    return {}


FULL_ALONE = windows("none")._replace(read=_full)
WINDOWS = ("sliding_window", "max_window_layers")
"""Keys that have no effect if use_sliding_window is false, as is required here."""
QWEN2_MOE = llama_layout(
    *("qwen2_moe", "Qwen2MoeForCausalLM", None, 32768),
    {"qkv_bias": Key("qkv_bias", True)},
    experts=ExpertKeys(
        shared="shared_expert_intermediate_size",
        others=NORMALIZED,
        always={"shared_gate": True},
        sparse=STEPS,
        aux=0.001,
    ),
    kv_heads=16,
    head_dim=FREE,
    harmless=WINDOWS,
    parts=(FULL_ALONE,),
)
QWEN3_MOE = llama_layout(
    *("qwen3_moe", "Qwen3MoeForCausalLM", None, 32768, BIAS),
    experts=ExpertKeys(others=NORMALIZED, sparse=STEPS, aux=0.001),
    kv_heads=4,
    harmless=WINDOWS,
    parts=(FULL_ALONE,),
)
OLMOE = llama_layout(
    *("olmoe", "OlmoeForCausalLM", "none", 4096, OLMO),
    experts=ExpertKeys(hidden="intermediate_size", others=NORMALIZED, aux=0.01),
    heads_divide=True,
    only={"clip_qkv": (None,)},
)
FLEX_OLMO = llama_layout(
    *("flex_olmo", "FlexOlmoForCausalLM", "none", 4096),
    {**OLMO, "norm_eps": Key("rms_norm_eps", 1e-6)},
    experts=ExpertKeys(hidden="intermediate_size", others=NORMALIZED, aux=0.01),
    more={"rope_theta": 5e5},
)


def _read_minimax(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads positions of old files, which state the number of rotated dims of a head instead of their share."""
    rotary, nested = fields["positions"], config.get("rope_parameters") or {}
    if config.get("rotary_dim") is None:
        return {}
    dims = config.whole("rotary_dim")
    if PARTIAL not in {*config.config, *nested}:
        return {"positions": replace(rotary, dims=dims)}
    if dims != (rotary.dims or fields["head_dim"]):
        raise ConfigError(
            f"config.json: rotary_dim is {dims}, but {PARTIAL} makes it {rotary.dims}; remove one"
        )
    return {}


MINIMAX_M2 = llama_layout(
    *("minimax_m2", "MiniMaxM2ForCausalLM", "none", 196608),
    experts=ExpertKeys(
        count=("num_local_experts", "num_experts"),
        hidden="intermediate_size",
        always={"score": "sigmoid", "choice_bias": True},
        aux=0.001,
    ),
    kv_heads=8,
    head_dim=Key("head_dim", 128),
    more={"rope_theta": 5e6, PARTIAL: 1.0},
    only={"router_jitter_noise": (0.0, None)},
    rope=PARTIAL,
    parts=(Part({"rotary_dim": None}, _read_minimax),),
    tensors=renamed({".gate.e_score_": ".e_score_", **W}),
)


YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN |= {TRAINED: 4096}
"""The rotary scaling if a config has none."""


def _read_gpt_oss(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("rope_parameters") is not None or config.get("rope_scaling") is not None:
        return {}
    usual = ConfigReader({**config.config, "rope_parameters": YARN}, config.defaults)
    return read_rope(usual, fields["head_dim"])


GPT_OSS = llama_layout(
    *("gpt_oss", "GptOssForCausalLM", "layer", 131072),
    dict.fromkeys(("qkv_bias", "out_bias"), Key("attention_bias", True)),
    experts=ExpertKeys(
        count=("num_local_experts", "num_experts"),
        hidden="intermediate_size",
        always={"router_bias": True},
        aux=0.001,
    ),
    kv_heads=8,
    head_dim=Key("head_dim", 64),
    without=("activation",),
    usual=every(2, 1),
    unused=UNUSED,
    more={"rope_theta": 150000.0, "sliding_window": 128},
    only={"hidden_act": ("silu",), "swiglu_alpha": (1.702, None), "swiglu_limit": (7.0, None)},
    harmless=("experts_per_token", "initial_context_length"),  # of OpenAI's own code
    parts=(Part(read=_read_gpt_oss),),
    tensors=renamed(
        {".mlp.gate.": ".mlp.router.", ".sink_logit": ".sinks"},
        partial(stacked, leaves={"weight": "", "bias": "_bias"}, turned=True),
    ),
)
AFMOE = llama_layout(
    *("afmoe", "AfmoeForCausalLM", "layer", 16384, {"norm_eps": Key("rms_norm_eps", 1e-5)}),
    experts=ExpertKeys(
        others={"scale": "route_scale"},
        always=SIGMOID,
        shared="num_shared_experts",
        shared_by_count=True,
        sparse=behind_first(1, "num_dense_layers"),
        usual={"route_scale": 1.0, "num_shared_experts": 2},
    ),
    head_dim=Key("head_dim", 128),
    usual=every(4, -1, key="global_attn_every_n_layers"),
    unused=UNUSED,
    more={"sliding_window": 1024, "global_attn_every_n_layers": 4},
    only={
        # keys of Arcee's own code; transformers supports only these values
        **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), (1, None)),
        "route_norm": (True, None),
        "score_func": ("sigmoid", None),
    },
    harmless=("load_balance_coeff", "use_grouped_mm", *REMOTE),
    parts=(scaled_embedding(None, "mup_enabled"), IN_WINDOWS),
    tensors=renamed(
        {
            **SHARED,
            ".gate.e_score_correction_bias": ".expert_bias",
            ".mlp.gate.": ".mlp.router.gate.",
            ".g_proj.": ".gate_proj.",
            "_feedforward_layernorm.": "_mlp_layernorm.",
        },
        linears=(".router.gate",),
    ),
)


def _usual_flint(config: ConfigReader, layers: int) -> list[str]:
    return [FULL if i < 2 or i % 4 == 1 or i == layers - 1 else SLIDING for i in range(layers)]


FLINT = llama_layout(
    *("flint", "FlintForCausalLM", "layer", 262144, BIAS),
    experts=ExpertKeys(
        others=NORMALIZED,
        always={"score": "sigmoid"},
        shared="shared_expert_intermediate_size",
        sparse=STEPS,
        aux=0.0005,
        usual={
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 1024,
            "mlp_only_layers": [0, 1],
        },
    ),
    kv_heads=4,
    head_dim=Key("head_dim", 128),
    usual=_usual_flint,
    unused=UNUSED,
    more={"sliding_window": 513},
    parts=(IN_WINDOWS,),
    tensors=renamed({".sink_logit": ".softmax_offset"}),
)
