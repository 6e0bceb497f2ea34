"""Families that are LLaMA but for rotations that are scaled in ways of their own, as `transformers` stores them.

HunYuan (Tencent 2025) has a larger base, said by an alpha, and norms of queries and keys behind their rotation;
Ministral 3 (Mistral AI 2025) multiplies queries by a factor that grows with their position (Llama 4, 2025); Apertus
(2025) has an activation with trained numbers, and no gate.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.hf.config_keys import ConfigReader, Inexpressible, Key
from headway.checkpoints.hf.harmless import words
from headway.checkpoints.hf.layouts.base import Part
from headway.checkpoints.hf.layouts.llama import BIAS, FREE, llama_layout
from headway.checkpoints.hf.layouts.parts import stated
from headway.checkpoints.hf.layouts.tensors import renamed_own
from headway.checkpoints.hf.rope import DEFAULT_THETA, ROPE, TRAINED, read_rope, write_rope
from headway.models import ModelSpec
from headway.positions import rotations

SCALINGS = ("rope_scaling", "rope_parameters")
KEYS = dict.fromkeys(ROPE)
EPS = {"norm_eps": Key("rms_norm_eps", 1e-5)}


def _read_hunyuan(given: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A "dynamic" scaling with an alpha does not depend on the length: the base is times alpha^(D / (D - 2)), and its
    other numbers are not looked at."""
    config, size = dict(given.config), fields["head_dim"]
    for key in SCALINGS:
        values = config.get(key)
        if isinstance(values, Mapping) and values.get("alpha") and "dynamic" in values.values():
            own = ConfigReader({"rope_theta": config.get("rope_theta"), **values}, {})
            theta = own.number("rope_theta", DEFAULT_THETA) * own.number("alpha") ** (size / max(size - 2, 1))
            config |= {key: {"rope_type": "default", "rope_theta": theta}, "rope_theta": None}
    return read_rope(ConfigReader(config, given.defaults), size)


HUNYUAN = llama_layout(
    *("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", "none", 2048, {**BIAS, **EPS}),
    only={"use_qk_norm": (True, None), "use_cla": (False, None)},
    # of Tencent's own code; transformers reads none of them
    harmless=words(
        "add_classification_head attention_head_dim cla_share_factor class_num dense_list eod_token_id im_end_id "
        "im_newline_id im_start_id mask_init_id norm_type org_vocab_size pad_id pool_type text_end_id text_start_id"
    ),
    rope=None,
    parts=(Part(KEYS, _read_hunyuan, write_rope),),
    tensors=renamed_own({"q_norm": "query_layernorm", "k_norm": "key_layernorm"}),
)
BETA = "llama_4_scaling_beta"


def _read_ministral3(given: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    config, numbers = dict(given.config), dict[str, Any]()
    for key in SCALINGS:
        if isinstance(values := config.get(key), Mapping):
            numbers = {**values}
            scaled = values.get("rope_type", values.get("type", "default")) != "default"
            other = (BETA, "max_position_embeddings", *(() if scaled else (TRAINED,)))
            config[key] = {k: v for k, v in values.items() if k not in other}
    own = ConfigReader(numbers, {})
    rope = read_rope(ConfigReader(config, given.defaults), fields["head_dim"])
    growth = own.number(BETA), own.whole(TRAINED)
    return {**rope, "positions": replace(rope["positions"], query_growth=growth)}


def _write_ministral3(spec: ModelSpec) -> dict[str, Any]:
    rope = write_rope(spec)
    growth = next((one.query_growth for one in rotations(spec.positions)), None)
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
    """Two numbers of xIELU that files hold, and nobody trains."""
    layers = range(spec.layers if spec.activation == "xielu" else 0)
    numbers = {"beta": 0.5, "eps": -1e-6}
    return {f"model.layers.{i}.mlp.act_fn.{n}": torch.tensor(v) for i in layers for n, v in numbers.items()}


APERTUS = llama_layout(
    *("apertus", "ApertusForCausalLM", "none", 65536),
    {**BIAS, **EPS, "activation": Key("hidden_act", "xielu")},
    head_dim=FREE,
    more={"rope_theta": 12e6},
    parts=(stated("apertus"),),
    tensors=replace(
        renamed_own(
            {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}
        ),
        constants=_constants,
    ),
)
