"""BLOOM as `transformers` stores it (BigScience 2022, section 3.2): ALiBi, and a norm behind the embedding."""

from __future__ import annotations

from collections.abc import Sequence

from headway.checkpoints.hf.config_keys import FieldMap
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.rules import WB, Rule, decoder_names, ends, qkv, sublayers
from headway.models import ModelSpec

KEYS: FieldMap = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "n_layer",
    "heads": "n_head",
    "kv_heads": "n_head",
    "trained_context": "seq_length",
    "norm_eps": "layer_norm_epsilon",
    "init_std": "initializer_range",
    "tied": "tie_word_embeddings",
}
NAMES = {
    "self_attn.o_proj": "self_attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
"""Modules that are named as in Megatron-LM, here and in Falcon."""
NORMS = {name: name for name in ("input_layernorm", "post_attention_layernorm")}
ZERO = (0, None)


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    ours, theirs = "model.layers.#.", "transformer.h.#."
    return [
        *ends(spec, "transformer.word_embeddings", "transformer.ln_f"),
        *sublayers("model.", "transformer.", {"embed_norm": "word_embeddings_layernorm"}, WB),
        *sublayers(ours, theirs, {**NAMES, **NORMS}, WB),
        *qkv(spec, f"{theirs}self_attention.query_key_value", by_group=True),
    ]


BLOOM = Layout(
    family="bloom",
    architectures={"BloomForCausalLM": "lm"},
    keys=KEYS,
    only={
        "apply_residual_connection_post_layernorm": (False, None),
        # not dropped behind the embedding, as ours would be; the published models have none
        "hidden_dropout": ZERO,
        "attention_dropout": ZERO,
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
    read=lambda given, kind: {"hidden": 4 * given.whole("hidden_size")},
    write=lambda spec: {},
    tensors=decoder_names(_rules, "transformer.", "transformer.word_embeddings"),
)
