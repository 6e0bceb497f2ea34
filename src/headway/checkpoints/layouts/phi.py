"""Phi (1, 1.5 and 2) as `transformers` stores it (Li et al. 2023, section 2.1): GPT-NeoX's turns, one norm for both
sub-layers, biases everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.checkpoints.given import Given
from headway.checkpoints.layouts.base import Layout, Rule, layered, one_number, same, sublayers
from headway.checkpoints.layouts.gpt2 import ACTS, WB
from headway.checkpoints.layouts.gpt_neox import PARTIAL, ROPE, read_partial, write_partial
from headway.models import ModelSpec

NAMES = {
    **{f"self_attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
    "self_attn.o_proj": "self_attn.dense",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
    "input_layernorm": "input_layernorm",
}


def _read(given: Given, kind: str) -> dict[str, Any]:
    width, heads = given.whole("hidden_size"), given.whole("num_attention_heads")
    rope = read_partial(given, given.number(PARTIAL), max(width // heads, 1), partial_rotary_factor=None)
    act = given.text("hidden_act")
    return {
        "vocab": given.whole("vocab_size"),
        "width": width,
        "layers": given.whole("num_hidden_layers"),
        "heads": heads,
        "kv_heads": given.whole("num_key_value_heads", heads),
        "hidden": given.whole("intermediate_size"),
        "positions": rope.rotary,
        "trained_context": rope.context,
        "activation": ACTS.get(act, act),
        "dropout": one_number(given, "resid_pdrop", "embd_pdrop"),
        "attention_dropout": given.number("attention_dropout"),
        "norm_eps": given.number("layer_norm_eps"),
        "init_std": given.number("initializer_range"),
        "tied": given.flag("tie_word_embeddings"),
    }


def _write(spec: ModelSpec) -> dict[str, Any]:
    keys, share = write_partial(spec)
    return {
        "vocab_size": spec.vocab,
        "hidden_size": spec.width,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "intermediate_size": spec.hidden,
        **keys,
        PARTIAL: share,
        "hidden_act": {v: k for k, v in reversed(ACTS.items())}[spec.activation],
        "resid_pdrop": spec.dropout,
        "embd_pdrop": spec.dropout,
        "attention_dropout": spec.attention_dropout,
        "layer_norm_eps": spec.norm_eps,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
    }


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    rules = [
        same("model.embed_tokens.weight", "model.embed_tokens.weight"),
        *sublayers("model.", "model.", {"norm": "final_layernorm"}, WB),
        *sublayers("model.layers.#.", "model.layers.#.", NAMES, WB),
        same("lm_head.bias", "lm_head.bias"),
    ]
    return layered(rules if spec.tied else [*rules, same("lm_head.weight", "lm_head.weight")], spec.layers)


PHI = Layout(
    family="phi",
    architectures={"PhiForCausalLM": "lm"},
    translated=(
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("intermediate_size", *ROPE, PARTIAL, "hidden_act", "resid_pdrop", "embd_pdrop"),
        *("attention_dropout", "layer_norm_eps", "initializer_range", "tie_word_embeddings"),
    ),
    only={"qk_layernorm": (False, None), "is_encoder_decoder": (False, None), "pruned_heads": ({}, None)},
    defaults={
        "vocab_size": 51200,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "intermediate_size": 8192,
        "max_position_embeddings": 2048,
        PARTIAL: 0.5,
        "hidden_act": "gelu_new",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attention_dropout": 0.0,
        "layer_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    },
    read=_read,
    write=_write,
    rules=_rules,
    aliases={"lm_head.weight": "model.embed_tokens.weight"},
)
