"""StarCoder2 as `transformers` stores it (Lozhkov et al. 2024, section 5): LLaMA's names, LayerNorm, and two matrices
in the feed-forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.checkpoints.given import Given
from headway.checkpoints.layouts.base import Layout, Rule, layered, one_number, same, sublayers
from headway.checkpoints.layouts.gpt2 import ACTS, WB
from headway.checkpoints.rope import read_rope, write_rope
from headway.checkpoints.windows import from_foreign
from headway.models import ModelSpec
from headway.patterns import Window
from headway.positions import Rotary

ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
FORWARD = {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
NORMS = ("input_layernorm", "post_attention_layernorm")


def _read(given: Given, kind: str) -> dict[str, Any]:
    width, heads = given.whole("hidden_size"), given.whole("num_attention_heads")
    head_dim = given.whole("head_dim", max(width // heads, 1))
    rope = read_rope(given.config, max_positions=given.whole("max_position_embeddings"), head_dim=head_dim)
    act, biased = given.text("hidden_act"), given.flag("use_bias")
    return {
        "vocab": given.whole("vocab_size"),
        "width": width,
        "layers": given.whole("num_hidden_layers"),
        "heads": heads,
        "kv_heads": given.whole("num_key_value_heads"),
        "head_dim": head_dim,
        "hidden": given.whole("intermediate_size"),
        "patterns": from_foreign("huggingface sliding_window", given.get("sliding_window")),
        "positions": rope.rotary,
        "activation": ACTS.get(act, act),
        "qkv_bias": biased,
        "out_bias": biased,
        "mlp_bias": biased,
        "dropout": one_number(given, "residual_dropout", "embedding_dropout"),
        "attention_dropout": given.number("attention_dropout"),
        "norm_eps": given.number("norm_epsilon"),
        "init_std": given.number("initializer_range"),
        "tied": given.flag("tie_word_embeddings"),
        "trained_context": rope.context,
    }


def _write(spec: ModelSpec) -> dict[str, Any]:
    first = spec.patterns[0]
    rotary = spec.positions if isinstance(spec.positions, Rotary) else Rotary(pairing="halves")
    return {
        "vocab_size": spec.vocab,
        "hidden_size": spec.width,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.hidden,
        "sliding_window": first.before + 1 if isinstance(first, Window) else None,
        **write_rope(rotary, spec.trained_context),
        "hidden_act": spec.activation,
        "use_bias": spec.qkv_bias,
        "residual_dropout": spec.dropout,
        "embedding_dropout": spec.dropout,
        "attention_dropout": spec.attention_dropout,
        "norm_epsilon": spec.norm_eps,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
    }


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    rules = [
        same("model.embed_tokens.weight", "model.embed_tokens.weight"),
        *sublayers("model.", "model.", {"norm": "norm"}, WB),
        *sublayers("model.layers.#.", "model.layers.#.", {name: name for name in NORMS}, WB),
    ]
    names = {**{name: name for name in ATTENTION}, **FORWARD}
    rules += sublayers("model.layers.#.", "model.layers.#.", names, WB if spec.qkv_bias else ("weight",))
    return layered(rules if spec.tied else [*rules, same("lm_head.weight", "lm_head.weight")], spec.layers)


STARCODER2 = Layout(
    family="starcoder2",
    architectures={"Starcoder2ForCausalLM": "lm"},
    translated=(
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "intermediate_size", "sliding_window", "max_position_embeddings", "rope_theta"),
        *("rope_scaling", "rope_parameters", "original_max_position_embeddings", "hidden_act", "use_bias"),
        *("residual_dropout", "embedding_dropout", "attention_dropout", "norm_epsilon", "initializer_range"),
        "tie_word_embeddings",
    ),
    only={
        "mlp_type": ("default", None),
        "norm_type": ("layer_norm", None),
        "scale_attn_weights": (True, None),
        "is_encoder_decoder": (False, None),
        "pruned_heads": ({}, None),
    },
    # names of GPTBigCode that its files still have: hidden_act and norm_epsilon are what counts
    harmless=(
        "activation_function",
        "layer_norm_epsilon",
        "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",
    ),
    defaults={
        "vocab_size": 49152,
        "hidden_size": 3072,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "intermediate_size": 12288,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "initializer_range": 0.018042,
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
    },
    read=_read,
    write=_write,
    rules=_rules,
    aliases={"lm_head.weight": "model.embed_tokens.weight"},
)
