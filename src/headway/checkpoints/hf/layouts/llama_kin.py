"""Families that are LLaMA but for a switch or two, as `transformers` stores them, most under LLaMA's names.

Layers without positions are SmolLM3's (Bakouch et al. 2025; Yang et al. 2025, section 3.2). Matrices are fused in
Phi-3, 3.5 and 4 (Abdin et al. 2024) and in GLM-4 (GLM team 2024), which from 0414 on norms what sub-layers give, too;
EXAONE 4 (LG AI 2025) norms that alone. Pairs are adjacent in GLM-4, Ernie 4.5 (Baidu 2025) and Helium (Kyutai 2025).
Seed-OSS (ByteDance 2025) has biases on queries, keys and values; InternLM3 (Cai et al. 2024) and IQuest-Coder are LLaMA
itself.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader, Key
from headway.checkpoints.hf.layer_types import LAYER_TYPES, every, read_kinds
from headway.checkpoints.hf.layouts.llama import (
    BIAS,
    FREE,
    MLP_BIAS,
    llama_layout,
    read_windows,
    write_windows,
)
from headway.checkpoints.hf.layouts.rules import decoder_names, same_names
from headway.checkpoints.hf.rope import PARTIAL, TRAINED
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.patterns import Causal
from headway.positions import LongRope, NoPositions, PerLayer, Rotary

TIED = {"tied": Key("tie_word_embeddings", True)}
REMOTE = ("auto_map",)
"""Where a model's repository has code of its own, which transformers does not run unless it is told to."""


def _read_smollm3(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    layers, marks = fields["layers"], given.get("no_rope_layers")
    if marks is None:
        every = given.whole("no_rope_layer_interval")
        marks = [int((i + 1) % every != 0) for i in range(layers)]
    if not isinstance(marks, list) or len(marks) < layers or not all(mark in (0, 1) for mark in marks):
        raise given.wrong(
            "no_rope_layers", f"a list of 1 (rotary) or 0 (no positions) for {layers} layers", marks
        )
    windowed = given.flag("use_sliding_window") and given.get("sliding_window") is not None
    usual = [LAYER_TYPES[windowed and not mark] for mark in marks[:layers]]
    return {
        "patterns": read_windows(given, "late", layers, usual),
        "positions": PerLayer.of([fields["positions"] if mark else NoPositions() for mark in marks[:layers]]),
    }


SMOLLM3 = llama_layout(
    *("smollm3", "SmolLM3ForCausalLM", "late", 32768),
    {**BIAS, **MLP_BIAS, **TIED},
    kv_heads=4,
    head_dim=FREE,
    more={"rope_theta": 2e6, "no_rope_layers": None, "no_rope_layer_interval": 4, "sliding_window": None},
    read=_read_smollm3,
    write=lambda spec: {
        **write_windows(spec, "late"),
        "no_rope_layers": [int(isinstance(one, Rotary)) for one in spec.layer_positions],
    },
)


def _read_phi3(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    scaling = fields["positions"].scaling
    if not isinstance(scaling, LongRope | None):
        raise ConfigError(
            f"config.json: rope_type of {type(scaling).__name__} in a phi3, which transformers reads as longrope; it "
            "has default and longrope"
        )
    return {"patterns": read_windows(given, "all", fields["layers"])}


def _write_phi3(spec: ModelSpec) -> dict[str, Any]:
    scaling = spec.positions.scaling if isinstance(spec.positions, Rotary) else None
    trained = scaling.trained_context if isinstance(scaling, LongRope) else spec.trained_context
    return {**write_windows(spec, "all", heads_divide=True), TRAINED: trained}


NORMS = ("input_layernorm", "post_attention_layernorm")
PLACES = ("", "model.embed_tokens", "model.norm", "model.layers.#.")
PHI3 = llama_layout(
    *("phi3", "Phi3ForCausalLM", "all", 4096),
    head_dim=FREE,
    more={PARTIAL: 1.0, TRAINED: 4096, "sliding_window": None},
    only={"resid_pdrop": (0.0, None)},  # falls on the outputs of sub-layers, and ours on the embedding, too
    harmless=(*REMOTE, "embd_pdrop"),  # which no class reads
    rope=PARTIAL,
    read=_read_phi3,
    write=_write_phi3,
    tensors=decoder_names(
        *PLACES,
        same_names(*NORMS, "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    ),
)
FUSED = same_names(*(f"self_attn.{part}_proj" for part in "qkvo"), "mlp.gate_up_proj", "mlp.down_proj")
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
GLM = _glm("glm", "GlmForCausalLM", tensors=decoder_names(*PLACES, {**same_names(*NORMS), **FUSED}))
GLM4 = _glm(
    *("glm4", "Glm4ForCausalLM"),
    tensors=decoder_names(
        *PLACES,
        {
            **FUSED,
            "input_layernorm": "input_layernorm",
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
    ),
)


def _read_exaone4(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Layers have rotary positions where they have a window, or where there are no windows at all."""
    windowed = given.get("sliding_window") is not None
    if given.get("layer_types") is None and not windowed:
        raise ConfigError(
            "config.json: an exaone4 without sliding_window needs layer_types, as in transformers"
        )
    usual = lambda layers: every(given.whole("sliding_window_pattern"), -1)(layers)  # noqa: E731
    kinds = read_kinds(given, fields["layers"], usual)
    patterns = read_windows(given, "layer", fields["layers"], kinds)
    rotary = [NoPositions() if windowed and one == Causal() else fields["positions"] for one in patterns]
    return {"patterns": patterns, "positions": PerLayer.of(rotary)}


EXAONE4 = llama_layout(
    *("exaone4", "Exaone4ForCausalLM", "layer", 2048),
    kv_heads=32,
    head_dim=FREE,
    more={"sliding_window_pattern": 4},
    read=_read_exaone4,
)
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


def _read_helium(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["heads"] * fields["head_dim"] != fields["width"]:
        raise ConfigError(
            f"config.json: {fields['heads']} heads of head_dim {fields['head_dim']} are not hidden_size "
            f"{fields['width']}, which the output projection of a helium takes"
        )
    return {"patterns": read_windows(given, "none", fields["layers"])}


HELIUM = llama_layout(
    *("helium", "HeliumForCausalLM", "none", 4096),
    {"qkv_bias": Key("attention_bias"), **MLP_BIAS},
    kv_heads=20,
    head_dim=Key("head_dim", 128),
    more={"rope_theta": 1e5},
    heads_divide=True,
    pairing="adjacent",
    read=_read_helium,
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


def _read_internlm3(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["qkv_bias"] != fields["mlp_bias"]:
        raise ConfigError(
            "config.json: an internlm3 whose qkv_bias differs from its bias is not supported: transformers runs it as "
            "a LLaMA, and refuses it, too"
        )
    return {"patterns": read_windows(given, "none", fields["layers"])}


INTERNLM3 = llama_layout(
    *("internlm3", ("LlamaForCausalLM", "InternLM3ForCausalLM"), "none", 32768),
    {**BIAS, **MLP_BIAS},
    kv_heads=2,
    head_dim=Key("head_dim", 128),
    heads_divide=True,
    only={"qkv_bias": (False,), "bias": (False,)},  # other names of attention_bias and mlp_bias
    harmless=REMOTE,
    read=_read_internlm3,
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
