"""Families that are LLaMA but for a switch or two, as `transformers` stores them, most under LLaMA's names.

Layers without positions are SmolLM3's (Bakouch et al. 2025; Yang et al. 2025, section 3.2). Matrices are fused in
Phi-3, 3.5 and 4 (Abdin et al. 2024) and in GLM-4 (GLM team 2024). Pairs are adjacent in GLM-4, Ernie 4.5 (Baidu 2025)
and Helium (Kyutai 2025). Seed-OSS (ByteDance 2025) has biases on queries, keys and values; InternLM3 (Cai et al. 2024)
and IQuest-Coder are LLaMA itself.
"""

from collections.abc import Mapping
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader, Key
from headway.checkpoints.hf.layer_types import LAYER_TYPES
from headway.checkpoints.hf.layouts.llama import (
    BIAS,
    FREE,
    MLP_BIAS,
    llama_layout,
    read_windows,
    write_windows,
)
from headway.checkpoints.hf.layouts.rules import decoder_names
from headway.checkpoints.hf.rope import PARTIAL, TRAINED
from headway.errors import ConfigError
from headway.models import ModelSpec
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
        *("", "model.embed_tokens", "model.norm", "model.layers.#."),
        {
            name: name
            for name in (
                *("input_layernorm", "post_attention_layernorm", "self_attn.qkv_proj", "self_attn.o_proj"),
                *("mlp.gate_up_proj", "mlp.down_proj"),
            )
        },
    ),
)
GLM = llama_layout(
    *("glm", "GlmForCausalLM", "none", 131072),
    {"qkv_bias": Key("attention_bias", True)},
    kv_heads=2,
    head_dim=Key("head_dim", 128),
    more={PARTIAL: 0.5},
    harmless=REMOTE,
    rope=PARTIAL,
    pairing="adjacent",
    tensors=decoder_names(
        *("", "model.embed_tokens", "model.norm", "model.layers.#."),
        {
            name: name
            for name in (
                *("input_layernorm", "post_attention_layernorm", "mlp.gate_up_proj", "mlp.down_proj"),
                *(f"self_attn.{part}_proj" for part in "qkvo"),
            )
        },
    ),
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
