"""MPT as `transformers` stores it (MosaicML 2023, LLM Foundry): ALiBi, one matrix for queries, keys and values, and no
biases at all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headway.checkpoints.families import HARMLESS
from headway.checkpoints.given import Given
from headway.checkpoints.layouts.base import Layout, Rule, fused, layered, same, sublayers
from headway.errors import ConfigError, did_you_mean
from headway.models import ModelSpec
from headway.positions import LinearBias

NAMES = {
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "ffn.up_proj",
    "mlp.down_proj": "ffn.down_proj",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
}
ATTENTION = {
    # transformers has no others: it makes three equal parts of Wqkv, and adds ALiBi, whatever is said here
    "attn_type": ("multihead_attention",),
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "attn_pdrop": (0,),
    "clip_qkv": (None,),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "attn_uses_sequence_id": (False,),
}

RUN = ("attn_impl", "model_type", "architectures", "label2id", "is_encoder_decoder")
"""Keys of `attn_config` that say how it is computed, or that every config of transformers has."""


def _read(given: Given, kind: str) -> dict[str, Any]:
    width, heads, attention = given.whole("d_model"), given.whole("n_heads"), given.get("attn_config") or {}
    if not isinstance(attention, Mapping):
        raise ConfigError(f'config.json: "attn_config" must be an object, got {attention!r}')
    known = (*ATTENTION, "softmax_scale", *RUN, *HARMLESS)
    for key, value in attention.items():
        if key not in known:
            raise ConfigError(f'config.json: unknown key "attn_config.{key}"{did_you_mean(key, known)}')
        if key in ATTENTION and value not in ATTENTION[key]:
            raise ConfigError(
                f'config.json: "attn_config.{key}" is {value!r}, which headway does not have for model_type mpt; '
                f"accepted is {ATTENTION[key][0]!r}"
            )
    inner = Given(attention, {})
    scaled = inner.get("softmax_scale") is not None
    return {
        "vocab": given.whole("vocab_size"),
        "width": width,
        "layers": given.whole("n_layers"),
        "heads": heads,
        "kv_heads": heads,
        "hidden": 4 * width,
        "positions": _slopes(heads),
        "attention_scale": inner.number("softmax_scale") if scaled else None,
        "norm_eps": given.number("layer_norm_epsilon"),
        "init_std": given.number("initializer_range"),
        "trained_context": given.whole("max_seq_len"),
        "tied": given.flag("tie_word_embeddings"),
    }


def _slopes(heads: int) -> LinearBias:
    """The published slopes for a power of two of heads. Else those of the next power P, 2^(-8 (h + 1) / P), first every
    second one (h = 1, 3, ...), then the others, as many as there are heads."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    return LinearBias() if power == heads else LinearBias(tuple([*slopes[1::2], *slopes[::2]][:heads]))


def _write(spec: ModelSpec) -> dict[str, Any]:
    return {
        "vocab_size": spec.vocab,
        "d_model": spec.width,
        "n_layers": spec.layers,
        "n_heads": spec.heads,
        "attn_config": {"softmax_scale": spec.attention_scale},
        "max_seq_len": spec.trained_context,
        "layer_norm_epsilon": spec.norm_eps,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
    }


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    ours, theirs = "model.layers.#.", "transformer.blocks.#."
    qkv = [f"{ours}self_attn.{name}_proj.weight" for name in "qkv"]
    rules = [
        same("model.embed_tokens.weight", "transformer.wte.weight"),
        same("model.norm.weight", "transformer.norm_f.weight"),
        *sublayers(ours, theirs, NAMES, ("weight",)),
        fused(qkv, f"{theirs}attn.Wqkv.weight", [spec.heads * spec.head_dim] * 3),
    ]
    return layered(rules if spec.tied else [*rules, same("lm_head.weight", "lm_head.weight")], spec.layers)


MPT = Layout(
    family="mpt",
    architectures={"MptForCausalLM": "lm", "MPTForCausalLM": "lm"},
    translated=(
        *("vocab_size", "d_model", "n_layers", "n_heads", "attn_config", "max_seq_len", "layer_norm_epsilon"),
        *("initializer_range", "tie_word_embeddings"),
    ),
    only={
        "expansion_ratio": (4, None),
        "no_bias": (True, None),
        "logit_scale": (None,),
        "resid_pdrop": (0, None),
        "emb_pdrop": (0, None),
        "is_encoder_decoder": (False, None),
        "pruned_heads": ({}, None),
    },
    # how LLM Foundry trained and ran them; a table of positions there is not beside ALiBi
    harmless=(
        "learned_pos_emb",
        "init_device",
        "embedding_fraction",
        "norm_type",
        "init_config",
        "tokenizer_name",
        "verbose",
    ),
    defaults={
        "vocab_size": 50368,
        "d_model": 2048,
        "n_layers": 24,
        "n_heads": 16,
        "max_seq_len": 2048,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
    read=_read,
    write=_write,
    rules=_rules,
    prefix="transformer.",
    aliases={"lm_head.weight": "transformer.wte.weight"},
)
