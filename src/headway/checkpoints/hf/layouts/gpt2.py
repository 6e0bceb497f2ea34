"""GPT-2 as `transformers` stores it (Radford et al. 2019): matrices [in, out], queries, keys and values in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.checkpoints.hf.config_keys import FieldMap, gelu_new
from headway.checkpoints.hf.config_reader import ConfigReader
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.rules import (
    WB,
    Rule,
    decoder_names,
    ends,
    qkv,
    same,
    sublayers,
    transposed,
)
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.positions import Learned

KEYS: FieldMap = {
    "vocab": "vocab_size",
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "kv_heads": "n_head",
    "activation": "activation_function",
    "dropout": ("resid_pdrop", "embd_pdrop"),
    "attention_dropout": "attn_pdrop",
    "norm_eps": "layer_norm_epsilon",
    "init_std": "initializer_range",
    "tied": "tie_word_embeddings",
}
NORMS = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
NAMES = {"self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
TRANSLATED = ("n_ctx", "n_inner")
ONLY = {
    "scale_attn_by_inverse_layer_idx": (False, None),
    "add_cross_attention": (False, None),
    "gradient_checkpointing": (False, None),
    # the order of two operations in training in mixed precision; no other value in exact numbers
    "reorder_and_upcast_attn": (False, True, None),
}
SUMMARY = ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
           "summary_first_dropout")  # fmt: skip
"""Keys of GPT2DoubleHeadsModel, which no language model looks at."""
DEFAULTS = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
}


def read_gpt2(given: ConfigReader, kind: str) -> dict[str, Any]:
    """The fields of GPT-2 and GPTBigCode that are not in the table."""
    size = given.whole("n_positions")
    if given.get("n_ctx") not in (None, size):
        raise ConfigError(
            f"config.json: n_ctx is {given.get('n_ctx')}, but the table of positions has n_positions {size} rows; "
            "transformers looks at n_positions alone: drop n_ctx, or make them equal"
        )
    return {
        "hidden": given.whole("n_inner", 4 * given.whole("n_embd")),
        "attention_scale": None if given.flag("scale_attn_weights") else 1.0,
        "positions": Learned(size),
        "trained_context": size,
    }


def write_gpt2(spec: ModelSpec) -> dict[str, Any]:
    """The keys that `read_gpt2` reads."""
    return {
        "n_positions": spec.context_limit or spec.trained_context,
        "n_inner": spec.hidden,
        "activation_function": gelu_new(spec.activation),
        "scale_attn_weights": spec.attention_scale != 1.0,
    }


def top_rules(spec: ModelSpec) -> list[Rule]:
    """Embeddings, last norm and output layer, named alike in GPT-2 and GPTBigCode."""
    return [
        *ends(spec, "transformer.wte", "transformer.ln_f"),
        same("model.embed_positions.weight", "transformer.wpe.weight"),
        *sublayers("model.layers.#.", "transformer.h.#.", NORMS, WB),
    ]


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    ours, theirs = "model.layers.#.", "transformer.h.#."
    return [
        *top_rules(spec),
        *qkv(spec, f"{theirs}attn.c_attn", transpose=True),
        *(transposed(f"{ours}{a}.weight", f"{theirs}{b}.weight") for a, b in NAMES.items()),
        *sublayers(ours, theirs, NAMES, ("bias",)),
    ]


GPT2 = Layout(
    family="gpt2",
    architectures={"GPT2LMHeadModel": "lm"},
    keys=KEYS,
    translated=TRANSLATED,
    only=ONLY,
    harmless=SUMMARY,
    defaults=DEFAULTS,
    read=read_gpt2,
    write=write_gpt2,
    tensors=decoder_names(
        _rules, "transformer.", "transformer.wte", unused=(".attn.bias", ".attn.masked_bias")
    ),
)
