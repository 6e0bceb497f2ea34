"""BLOOM as `transformers` stores it (BigScience 2022, section 3.2): ALiBi, and a norm behind the embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.checkpoints.given import Given
from headway.checkpoints.layouts.base import Layout, Rule, interleaved, layered, same, sublayers
from headway.checkpoints.layouts.gpt2 import WB
from headway.models import ModelSpec

NAMES = {
    "self_attn.o_proj": "self_attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
}
ZERO = (0, None)


def _read(given: Given, kind: str) -> dict[str, Any]:
    width, heads = given.whole("hidden_size"), given.whole("n_head")
    return {
        "vocab": given.whole("vocab_size"),
        "width": width,
        "layers": given.whole("n_layer"),
        "heads": heads,
        "kv_heads": heads,
        "hidden": 4 * width,
        "norm_eps": given.number("layer_norm_epsilon"),
        "init_std": given.number("initializer_range"),
        "trained_context": given.whole("seq_length"),
        "tied": given.flag("tie_word_embeddings"),
    }


def _write(spec: ModelSpec) -> dict[str, Any]:
    return {
        "vocab_size": spec.vocab,
        "hidden_size": spec.width,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "seq_length": spec.trained_context,
        "layer_norm_epsilon": spec.norm_eps,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
    }


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    ours, theirs = "model.layers.#.", "transformer.h.#."
    tops = {"embed_norm": "word_embeddings_layernorm", "norm": "ln_f"}
    rules = [
        same("model.embed_tokens.weight", "transformer.word_embeddings.weight"),
        *sublayers("model.", "transformer.", tops, WB),
        *sublayers(ours, theirs, NAMES, WB),
    ]
    for leaf in WB:
        qkv = [f"{ours}self_attn.{name}_proj.{leaf}" for name in "qkv"]
        fused = f"{theirs}self_attention.query_key_value.{leaf}"
        rules.append(interleaved(qkv, fused, spec.heads, spec.heads, spec.head_dim))
    return layered(rules if spec.tied else [*rules, same("lm_head.weight", "lm_head.weight")], spec.layers)


BLOOM = Layout(
    family="bloom",
    architectures={"BloomForCausalLM": "lm"},
    translated=(
        *("vocab_size", "hidden_size", "n_layer", "n_head", "seq_length", "layer_norm_epsilon"),
        *("initializer_range", "tie_word_embeddings"),
    ),
    only={
        "apply_residual_connection_post_layernorm": (False, None),
        # not dropped behind the embedding, as ours would be; the published models have none
        "hidden_dropout": ZERO,
        "attention_dropout": ZERO,
        "is_encoder_decoder": (False, None),
        "pruned_heads": ({}, None),
    },
    harmless=(
        "slow_but_exact",
        "unk_token_id",
        "masked_softmax_fusion",
        "skip_bias_add",
        "skip_bias_add_qkv",
        "attention_softmax_in_fp32",
        "bias_dropout_fusion",
        "offset_alibi",
    ),
    defaults={
        "vocab_size": 250880,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 8,
        "seq_length": 2048,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
    read=_read,
    write=_write,
    rules=_rules,
    prefix="transformer.",
    aliases={"lm_head.weight": "transformer.word_embeddings.weight"},
)
