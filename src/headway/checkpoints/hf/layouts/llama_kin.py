"""Families that differ from LLaMA in few properties, as `transformers` stores them, most under LLaMA's names.

Matrices are fused in Phi-3, 3.5 and 4 (Abdin et al. 2024) and in GLM-4 (GLM team 2024), which from 0414 on also
normalizes the outputs of sub-layers. Pairs are adjacent in GLM-4, Ernie 4.5 (Baidu 2025) and Helium (Kyutai 2025).
Seed-OSS (ByteDance 2025) has biases on queries, keys and values; InternLM3 (Cai et al. 2024) and IQuest-Coder are LLaMA
itself. HunYuan (Tencent 2025) has a larger rotary base, given by an alpha, and norms of queries and keys after their
rotation; Ministral 3 (Mistral AI 2025) multiplies queries by a factor that grows with their position (Llama 4, 2025);
Apertus (2025) has an activation with trained parameters, and no gate.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.hf.config_keys import ConfigReader, Inexpressible, Key
from headway.checkpoints.hf.harmless import words
from headway.checkpoints.hf.layouts.base import Part
from headway.checkpoints.hf.layouts.llama import BIAS, FREE, MLP_BIAS, block_names, llama_layout
from headway.checkpoints.hf.layouts.parts import stated
from headway.checkpoints.hf.layouts.rules import block, same_names
from headway.checkpoints.hf.layouts.tensors import renamed
from headway.checkpoints.hf.rope import DEFAULT_THETA, PARTIAL, ROPE, SCALINGS, TRAINED, read_rope, write_rope
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.positions import LongRope, Rotary, rotations

TIED = {"tied": Key("tie_word_embeddings", True)}
REMOTE = ("auto_map",)
"""Key of repositories with code of their own, which transformers does not run unless it is told to."""


def _check_phi3(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    scaling = fields["positions"].scaling
    if not isinstance(scaling, LongRope | None):
        raise ConfigError(
            f"config.json: rope scaling {type(scaling).__name__} is unsupported in a phi3, where transformers reads "
            'every rope_type as longrope; accepted is "default" or "longrope"'
        )
    return {}


def _write_phi3(spec: ModelSpec) -> dict[str, Any]:
    scaling = spec.positions.scaling if isinstance(spec.positions, Rotary) else None
    return {TRAINED: scaling.trained_context if isinstance(scaling, LongRope) else spec.trained_context}


FUSED = same_names("mlp.gate_up_proj", "mlp.down_proj")
NORMS = "input_layernorm post_attention_layernorm"
PHI3 = llama_layout(
    *("phi3", "Phi3ForCausalLM", "all", 4096),
    head_dim=FREE,
    heads_divide=True,
    more={PARTIAL: 1.0, "sliding_window": None},
    only={"resid_pdrop": (0.0, None)},  # applies to outputs of sub-layers, and ours to the embedding, too
    harmless=(*REMOTE, "embd_pdrop"),  # no class reads embd_pdrop
    rope=PARTIAL,
    parts=(Part({TRAINED: 4096}, _check_phi3, _write_phi3),),
    tensors=block_names({**block(NORMS, "self_attn. qkv_proj o_proj", ""), **FUSED}),
)
_glm = partial(
    llama_layout,
    where="none",
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
GLM = _glm("glm", "GlmForCausalLM", tensors=block_names({**block(NORMS, QKVO, ""), **FUSED}))
GLM4 = _glm("glm4", "Glm4ForCausalLM", tensors=block_names({**block(FOUR_NORMS, QKVO, ""), **FUSED}))
ERNIE45 = llama_layout(
    *("ernie4_5", "Ernie4_5ForCausalLM", "none", 131072),
    {**dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), Key("use_bias")), **TIED},
    kv_heads=2,
    head_dim=Key("head_dim", 128),
    more={"rope_theta": 5e5},
    without=("attention_dropout",),  # transformers ignores it
    only={"attention_dropout": (0.0, None)},
    harmless=REMOTE,
    pairing="adjacent",
)


def _check_helium(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["heads"] * fields["head_dim"] != fields["width"]:
        raise ConfigError(
            f"config.json: num_attention_heads {fields['heads']} x head_dim {fields['head_dim']} of a helium must be "
            f"hidden_size {fields['width']}, the input size of its output projection"
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


def _check_internlm3(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["qkv_bias"] != fields["mlp_bias"]:
        raise ConfigError(
            "config.json: qkv_bias and bias of an internlm3 must be equal: transformers runs it as a LLaMA and refuses "
            "other configs"
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


KEYS = dict.fromkeys(ROPE)
EPS = {"norm_eps": Key("rms_norm_eps", 1e-5)}


def _read_hunyuan(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads positions. A "dynamic" scaling with an alpha does not depend on the length: the base is multiplied by
    alpha^(D / (D - 2)), and its other numbers are ignored."""
    keys, size = dict(config.config), fields["head_dim"]
    for key in SCALINGS:
        values = keys.get(key)
        if isinstance(values, Mapping) and values.get("alpha") and "dynamic" in values.values():
            reader = ConfigReader({"rope_theta": keys.get("rope_theta"), **values}, {})
            theta = reader.number("rope_theta", DEFAULT_THETA) * reader.number("alpha") ** (
                size / max(size - 2, 1)
            )
            keys |= {key: {"rope_type": "default", "rope_theta": theta}, "rope_theta": None}
    return read_rope(ConfigReader(keys, config.defaults), size)


HUNYUAN = llama_layout(
    *("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", "none", 2048, {**BIAS, **EPS}),
    only={"use_qk_norm": (True, None), "use_cla": (False, None)},
    # keys of Tencent's own code; transformers reads none of them
    harmless=words(
        "add_classification_head attention_head_dim cla_share_factor class_num dense_list eod_token_id im_end_id "
        "im_newline_id im_start_id mask_init_id norm_type org_vocab_size pad_id pool_type text_end_id text_start_id"
    ),
    rope=None,
    parts=(Part(KEYS, _read_hunyuan, write_rope),),
    tensors=renamed({".q_norm.": ".query_layernorm.", ".k_norm.": ".key_layernorm."}),
)
BETA = "llama_4_scaling_beta"


def _read_ministral3(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    keys, numbers = dict(config.config), dict[str, Any]()
    for key in SCALINGS:
        if isinstance(values := keys.get(key), Mapping):
            numbers = {**values}
            scaled = values.get("rope_type", values.get("type", "default")) != "default"
            other = (BETA, "max_position_embeddings", *(() if scaled else (TRAINED,)))
            keys[key] = {k: v for k, v in values.items() if k not in other}
    reader = ConfigReader(numbers, {})
    rope = read_rope(ConfigReader(keys, config.defaults), fields["head_dim"])
    growth = reader.number(BETA), reader.whole(TRAINED)
    return {**rope, "positions": replace(rope["positions"], query_growth=growth)}


def _write_ministral3(spec: ModelSpec) -> dict[str, Any]:
    rope = write_rope(spec)
    growth = next((rotary.query_growth for rotary in rotations(spec.positions)), None)
    if growth is None:
        raise Inexpressible("positions")
    rope["rope_parameters"] |= {BETA: growth[0], TRAINED: growth[1]}
    return {**rope, "rope_scaling": None}


MINISTRAL3 = llama_layout(
    *("ministral3", "Ministral3ForCausalLM", "all", 262144, EPS),
    kv_heads=8,
    head_dim=Key("head_dim", 128),
    more={"sliding_window": None},
    rope=None,
    parts=(stated("ministral3"), Part(KEYS, _read_ministral3, _write_ministral3)),
)


def _constants(spec: ModelSpec) -> Mapping[str, Tensor]:
    """Returns two numbers of xIELU that files hold and that are not trained."""
    layers = range(spec.layers if spec.activation == "xielu" else 0)
    numbers = {"beta": 0.5, "eps": -1e-6}
    return {f"model.layers.{i}.mlp.act_fn.{n}": torch.tensor(v) for i in layers for n, v in numbers.items()}


APERTUS = llama_layout(
    *("apertus", "ApertusForCausalLM", "none", 65536),
    {**BIAS, **EPS, "activation": Key("hidden_act", "xielu")},
    head_dim=FREE,
    more={"rope_theta": 12e6},
    parts=(stated("apertus"),),
    tensors=renamed(
        {
            ".input_layernorm.": ".attention_layernorm.",
            ".post_attention_layernorm.": ".feedforward_layernorm.",
        },
        constants=_constants,
    ),
)
# Apertus with token ids of images and sounds besides those of texts; published files have no output rows for these
APERTUS_1_5 = replace(
    APERTUS,
    family="apertus1p5_text",
    architectures={"Apertus1p5TextForCausalLM": "lm"},
    parts=(stated("apertus1p5_text"),),
    only={**APERTUS.only, "output_vocab_size": (None,)},
)
