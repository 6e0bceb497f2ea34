"""LFM2 as `transformers` stores it (Liquid AI 2025): gated short convolutions between layers of attention with norms of
queries and keys; with or without experts, chosen by sigmoids, after dense first layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader, Key
from headway.checkpoints.hf.layouts.base import Part
from headway.checkpoints.hf.layouts.experts import ExpertKeys, behind_first
from headway.checkpoints.hf.layouts.hybrids import MIXER, by_mixer, mixed, mixer_keys
from headway.checkpoints.hf.layouts.llama import FREE, llama_layout
from headway.checkpoints.hf.layouts.rules import WB, Rule, lifted, same
from headway.checkpoints.hf.layouts.tensors import renamed
from headway.checkpoints.hf.windows import FULL, layer_types, read_kinds
from headway.models import ModelSpec
from headway.models.mixers import Softmax
from headway.nn import ShortConv

CONV = "conv"


def _read_lfm2(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    layers = fields["layers"]
    full = config.get("full_attn_idxs")
    if full is not None and not (isinstance(full, list) and all(type(i) is int for i in full)):
        raise config.wrong("full_attn_idxs", "a list of numbers of layers", full)
    usual = [FULL if full is None or i in full else CONV for i in range(layers)]
    kinds = read_kinds(config, layers, usual, (FULL, CONV))
    hidden = config.whole("intermediate_size" if config.get("block_ff_dim") is None else "block_ff_dim")
    if config.get("block_auto_adjust_ff_dim") is not False:
        hidden = int(2 * hidden / 3)
        if config.config.get("block_ffn_dim_multiplier", 1.0) is not None:  # null disables the rounding, too
            multiple = config.whole("block_multiple_of")
            hidden = -(-int(config.number("block_ffn_dim_multiplier") * hidden) // multiple) * multiple
    return {"hidden": hidden, **_mixers(config, kinds)}


def _mixers(config: ConfigReader, kinds: Sequence[str]) -> dict[str, Any]:
    short = ShortConv(conv=config.whole("conv_L_cache"), bias=config.flag("conv_bias"))
    return {
        **mixed(kinds, short),
        **({} if config.get("tie_embedding") is None else {"tied": config.flag("tie_embedding")}),
    }


def _read_moe(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    return _mixers(config, layer_types(config.get("layer_types"), fields["layers"], (FULL, CONV)))


def _write(spec: ModelSpec) -> dict[str, Any]:
    short, kinds = mixer_keys(spec, ShortConv, CONV)
    keys = {} if short is None else {"conv_L_cache": short.conv, "conv_bias": short.bias}
    return {"layer_types": kinds, **keys}


def _write_lfm2(spec: ModelSpec) -> dict[str, Any]:
    return {**_write(spec), "intermediate_size": spec.hidden, "block_auto_adjust_ff_dim": False}


def mixer_rules(spec: ModelSpec) -> list[Rule]:
    """Returns the rules of the token mixers in LFM2."""
    theirs = "model.layers.#.conv."
    attention = {**{f"{n}_proj": f"{n}_proj" for n in "qkv"}, "o_proj": "out_proj"}
    attention |= {f"{n}_norm": f"{n}_layernorm" for n in "qk"}
    softmax = [same(f"{MIXER}{a}.weight", f"{MIXER}{b}.weight") for a, b in attention.items()]

    def convolution(short: ShortConv) -> list[Rule]:
        rules = [
            same(f"{MIXER}{a}.{leaf}", f"{theirs}{b}.{leaf}")
            for a, b in (("in_proj", "in_proj"), ("o_proj", "out_proj"))
            for leaf in WB[: 1 + short.bias]
        ]
        rules.append(Rule((f"{MIXER}conv",), f"{theirs}conv.weight", changes=(lifted(1),)))
        return [*rules, *([same(f"{MIXER}conv_bias", f"{theirs}conv.bias")] if short.bias else [])]

    return by_mixer(spec, {Softmax: lambda _: softmax, ShortConv: convolution})


OTHERS = {
    "model.norm.": "model.embedding_norm.",
    ".input_layernorm.": ".operator_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".mlp.gate.e_score_correction_bias": ".feed_forward.expert_bias",
    ".mlp.": ".feed_forward.",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
}
"""Parts of names that differ: ours -> theirs."""
KEYS = {"norm_eps": Key("norm_eps", 1e-5), "tied": Key("tie_word_embeddings", True)}
CONVS = {"conv_L_cache": 3, "conv_bias": None, "tie_embedding": None}
LFM2 = llama_layout(
    *("lfm2", "Lfm2ForCausalLM", None, 128000),
    KEYS,
    kv_heads=8,
    head_dim=FREE,
    without=("activation", "attention_dropout", "hidden"),
    more={
        "rope_theta": 1e6,
        "intermediate_size": 12288,
        "block_ff_dim": None,
        "block_auto_adjust_ff_dim": None,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "full_attn_idxs": None,
    },
    only={"use_pos_enc": (True, None), "block_use_swiglu": (True, None)},
    harmless=(
        *(
            f"block_{name}"
            for name in ("dim", "mlp_init_scale", "out_init_scale", "use_xavier_init", "norm_eps")
        ),
        *("conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta"),
    ),
    parts=(Part(CONVS, _read_lfm2, _write_lfm2),),
    tensors=renamed(OTHERS, mixer_rules),
)
LFM2_MOE = llama_layout(
    *("lfm2_moe", "Lfm2MoeForCausalLM", None, 128000, KEYS),
    experts=ExpertKeys(
        others={
            "normalized": "norm_topk_prob",
            "scale": "routed_scaling_factor",
            "choice_bias": "use_expert_bias",
        },
        always={"score": "sigmoid", "sum_eps": 1e-6},
        sparse=behind_first(2, "num_dense_layers"),
        usual={"norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True},
    ),
    kv_heads=8,
    head_dim=FREE,
    without=("activation", "attention_dropout"),
    more={"rope_theta": 1e6},
    harmless=("theta",),
    parts=(Part(CONVS, _read_moe, _write),),
    tensors=renamed(OTHERS, mixer_rules),
)
