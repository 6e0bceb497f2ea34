"""GPT-2 as `transformers` stores it (Radford et al. 2019): matrices [in, out], queries, keys and values in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.checkpoints.given import Given
from headway.checkpoints.layouts.base import (
    Layout,
    Rule,
    fused,
    layered,
    one_number,
    same,
    sublayers,
    transposed,
)
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.positions import Learned

ACTS = {"gelu_new": "gelu_pytorch_tanh", "gelu_pytorch_tanh": "gelu_pytorch_tanh", "gelu": "gelu",
        "relu": "relu", "silu": "silu", "swish": "silu"}  # fmt: skip
WB = ("weight", "bias")
NORMS = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
TRANSLATED = (
    *("vocab_size", "n_positions", "n_ctx", "n_embd", "n_layer", "n_head", "n_inner", "activation_function"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "layer_norm_epsilon", "initializer_range"),
    *("scale_attn_weights", "tie_word_embeddings"),
)
ONLY = {
    "scale_attn_by_inverse_layer_idx": (False, None),
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "gradient_checkpointing": (False, None),
    "pruned_heads": ({}, None),
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


def read_gpt2(given: Given, kind: str) -> dict[str, Any]:
    """The fields that GPT-2 and GPTBigCode share."""
    width, size = given.whole("n_embd"), given.whole("n_positions")
    if given.get("n_ctx") not in (None, size):
        raise ConfigError(
            f"config.json: n_ctx is {given.get('n_ctx')}, but the table of positions has n_positions {size} rows; "
            "transformers looks at n_positions alone: drop n_ctx, or make them equal"
        )
    act = given.text("activation_function")
    return {
        "vocab": given.whole("vocab_size"),
        "width": width,
        "layers": given.whole("n_layer"),
        "heads": given.whole("n_head"),
        "kv_heads": given.whole("n_head"),
        "hidden": given.whole("n_inner", 4 * width),
        "activation": ACTS.get(act, act),
        "dropout": one_number(given, "resid_pdrop", "embd_pdrop"),
        "attention_dropout": given.number("attn_pdrop"),
        "attention_scale": None if given.flag("scale_attn_weights") else 1.0,
        "norm_eps": given.number("layer_norm_epsilon"),
        "init_std": given.number("initializer_range"),
        "positions": Learned(size),
        "trained_context": size,
        "tied": given.flag("tie_word_embeddings"),
    }


def write_gpt2(spec: ModelSpec) -> dict[str, Any]:
    """The keys that `read_gpt2` reads."""
    return {
        "vocab_size": spec.vocab,
        "n_positions": spec.context_limit or spec.trained_context,
        "n_embd": spec.width,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_inner": spec.hidden,
        "activation_function": {v: k for k, v in reversed(ACTS.items())}[spec.activation],
        "resid_pdrop": spec.dropout,
        "embd_pdrop": spec.dropout,
        "attn_pdrop": spec.attention_dropout,
        "layer_norm_epsilon": spec.norm_eps,
        "initializer_range": spec.init_std,
        "scale_attn_weights": spec.attention_scale != 1.0,
        "tie_word_embeddings": spec.tied,
    }


def top_rules(spec: ModelSpec, prefix: str = "transformer.") -> list[Rule]:
    """Embeddings, last norm and output layer, named alike in GPT-2 and GPTBigCode."""
    rules = [
        same("model.embed_tokens.weight", f"{prefix}wte.weight"),
        same("model.embed_positions.weight", f"{prefix}wpe.weight"),
        *sublayers("model.", prefix, {"norm": "ln_f"}, WB),
        *sublayers("model.layers.#.", f"{prefix}h.#.", NORMS, WB),
    ]
    return rules if spec.tied else [*rules, same("lm_head.weight", "lm_head.weight")]


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    ours, theirs, rules = "model.layers.#.", "transformer.h.#.", top_rules(spec)
    size = spec.heads * spec.head_dim
    for leaf in WB:
        qkv = [f"{ours}self_attn.{name}_proj.{leaf}" for name in "qkv"]
        rules.append(fused(qkv, f"{theirs}attn.c_attn.{leaf}", [size] * 3, transpose=True))
    names = {"self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
    rules += [transposed(f"{ours}{a}.weight", f"{theirs}{b}.weight") for a, b in names.items()]
    return layered([*rules, *sublayers(ours, theirs, names, ("bias",))], spec.layers)


GPT2 = Layout(
    family="gpt2",
    architectures={"GPT2LMHeadModel": "lm"},
    translated=TRANSLATED,
    only=ONLY,
    harmless=SUMMARY,
    defaults=DEFAULTS,
    read=read_gpt2,
    write=write_gpt2,
    rules=_rules,
    prefix="transformer.",
    aliases={"lm_head.weight": "transformer.wte.weight"},
    unused=(".attn.bias", ".attn.masked_bias"),
)
