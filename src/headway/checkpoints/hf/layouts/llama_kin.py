"""Families that are LLaMA but for a switch or two, as `transformers` stores them, most under LLaMA's names.

Matrices are fused in Phi-3, 3.5 and 4 (Abdin et al. 2024) and in GLM-4 (GLM team 2024), which from 0414 on norms what
sub-layers give, too. Pairs are adjacent in GLM-4, Ernie 4.5 (Baidu 2025) and Helium (Kyutai 2025). Seed-OSS (ByteDance
2025) has biases on queries, keys and values; InternLM3 (Cai et al. 2024) and IQuest-Coder are LLaMA itself.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader, Key
from headway.checkpoints.hf.layouts.base import Part
from headway.checkpoints.hf.layouts.llama import BIAS, FREE, MLP_BIAS, llama_layout
from headway.checkpoints.hf.layouts.rules import block, decoder_names, same_names
from headway.checkpoints.hf.rope import PARTIAL, TRAINED
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.positions import LongRope, Rotary

TIED = {"tied": Key("tie_word_embeddings", True)}
REMOTE = ("auto_map",)
"""Where a model's repository has code of its own, which transformers does not run unless it is told to."""


def _check_phi3(given: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    scaling = fields["positions"].scaling
    if not isinstance(scaling, LongRope | None):
        raise ConfigError(
            f"config.json: rope_type of {type(scaling).__name__} in a phi3, which transformers reads as longrope; it "
            "has default and longrope"
        )
    return {}


def _write_phi3(spec: ModelSpec) -> dict[str, Any]:
    scaling = spec.positions.scaling if isinstance(spec.positions, Rotary) else None
    return {TRAINED: scaling.trained_context if isinstance(scaling, LongRope) else spec.trained_context}


FUSED = same_names("mlp.gate_up_proj", "mlp.down_proj")
NORMS = "input_layernorm post_attention_layernorm"
_names = partial(decoder_names, "", "model.embed_tokens", "model.norm", "model.layers.#.")
PHI3 = llama_layout(
    *("phi3", "Phi3ForCausalLM", "all", 4096),
    head_dim=FREE,
    heads_divide=True,
    more={PARTIAL: 1.0, "sliding_window": None},
    only={"resid_pdrop": (0.0, None)},  # falls on the outputs of sub-layers, and ours on the embedding, too
    harmless=(*REMOTE, "embd_pdrop"),  # which no class reads
    rope=PARTIAL,
    parts=(Part({TRAINED: 4096}, _check_phi3, _write_phi3),),
    tensors=_names({**block(NORMS, "self_attn. qkv_proj o_proj", ""), **FUSED}),
)
_glm = partial(
    llama_layout,
    windows="none",
    context=131072,
    keys={"qkv_bias": Key("attention_bias", True)},
    kv_heads=2,
    head_dim=Key("head_dim", 128),
    more={PARTIAL: 0.5},
    harmless=REMOTE,
    rope=PARTIAL,
    pairing="adjacent",
)
QKVO = "self_attn. q_proj k_proj v_proj o_proj"
FOUR_NORMS = "input_layernorm post_self_attn_layernorm post_attention_layernorm post_mlp_layernorm"
GLM = _glm("glm", "GlmForCausalLM", tensors=_names({**block(NORMS, QKVO, ""), **FUSED}))
GLM4 = _glm("glm4", "Glm4ForCausalLM", tensors=_names({**block(FOUR_NORMS, QKVO, ""), **FUSED}))
ERNIE45 = llama_layout(
    *("ernie4_5", "Ernie4_5ForCausalLM", "none", 131072),
    {**dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), Key("use_bias")), **TIED},
    kv_heads=2,
    head_dim=Key("head_dim", 128),
    more={"rope_theta": 5e5},
    without=("attention_dropout",),  # which transformers does not look at
    only={"attention_dropout": (0.0, None)},
    harmless=REMOTE,
    pairing="adjacent",
)


def _check_helium(given: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["heads"] * fields["head_dim"] != fields["width"]:
        raise ConfigError(
            f"config.json: {fields['heads']} heads of head_dim {fields['head_dim']} are not hidden_size "
            f"{fields['width']}, which the output projection of a helium takes"
        )
    return {}


HELIUM = llama_layout(
    *("helium", "HeliumForCausalLM", "none", 4096),
    {"qkv_bias": Key("attention_bias"), **MLP_BIAS},
    kv_heads=20,
    head_dim=Key("head_dim", 128),
    more={"rope_theta": 1e5},
    heads_divide=True,
    pairing="adjacent",
    parts=(Part(read=_check_helium),),
)
SEED_OSS = llama_layout(
    *("seed_oss", "SeedOssForCausalLM", "none", 524288),
    {
        "qkv_bias": Key("attention_bias", True),
        "out_bias": Key("attention_out_bias"),
        **MLP_BIAS,
        "dropout": Key("residual_dropout", 0.1),
        "attention_dropout": Key("attention_dropout", 0.1),
    },
    kv_heads=8,
    head_dim=Key("head_dim", 128),
)


def _check_internlm3(given: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["qkv_bias"] != fields["mlp_bias"]:
        raise ConfigError(
            "config.json: an internlm3 whose qkv_bias differs from its bias is not supported: transformers runs it as "
            "a LLaMA, and refuses it, too"
        )
    return {}


INTERNLM3 = llama_layout(
    *("internlm3", ("LlamaForCausalLM", "InternLM3ForCausalLM"), "none", 32768),
    {**BIAS, **MLP_BIAS},
    kv_heads=2,
    head_dim=Key("head_dim", 128),
    heads_divide=True,
    only={"qkv_bias": (False,), "bias": (False,)},  # other names of attention_bias and mlp_bias
    harmless=REMOTE,
    parts=(Part(read=_check_internlm3),),
)
IQUESTCODER = llama_layout(
    *("iquestcoder", ("LlamaForCausalLM", "IQuestCoderForCausalLM"), "none", 131072),
    {**BIAS, **MLP_BIAS},
    kv_heads=8,
    head_dim=Key("head_dim", 128),
    heads_divide=True,
    only={"clip_qkv": (None,)},
    harmless=REMOTE,
)
