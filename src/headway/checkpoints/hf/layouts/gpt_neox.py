"""GPT-NeoX, and Pythia, as `transformers` stores them (Black et al. 2022, section 2.1): a part of each head is turned,
and attention and feed-forward are parallel, each behind its own norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.checkpoints.hf.config_keys import DECODER, FieldMap
from headway.checkpoints.hf.config_reader import ConfigReader
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.rotary import ROPE, read_partial, rope_parameters, write_partial
from headway.checkpoints.hf.layouts.rules import WB, Rule, decoder_names, ends, qkv, sublayers
from headway.models import ModelSpec

KEYS: FieldMap = {
    **DECODER,
    "kv_heads": "num_attention_heads",
    "qkv_bias": "attention_bias",
    "out_bias": "attention_bias",
    "dropout": "hidden_dropout",
    "norm_eps": "layer_norm_eps",
}
NAMES = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def _read(given: ConfigReader, kind: str) -> dict[str, Any]:
    width, heads = given.whole("hidden_size"), given.whole("num_attention_heads")
    theta = given.get("rotary_emb_base")
    base = {} if theta is None or "rope_theta" in given.config else {"rope_theta": theta}
    rope = read_partial(
        given,
        given.number("rotary_pct"),
        max(width // heads, 1),
        **({} if "rope_theta" in rope_parameters(given) else base),
    )
    return {
        "order": "parallel" if given.flag("use_parallel_residual") else "pre",
        "positions": rope.rotary,
        "trained_context": rope.context,
    }


def _write(spec: ModelSpec) -> dict[str, Any]:
    keys, share = write_partial(spec)
    return {
        **keys,
        "rotary_pct": share,
        "rotary_emb_base": keys["rope_theta"],
        "use_parallel_residual": spec.order == "parallel",
    }


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    ours, theirs, leaves = "model.layers.#.", "gpt_neox.layers.#.", WB if spec.qkv_bias else ("weight",)
    return [
        *ends(spec, "gpt_neox.embed_in", "gpt_neox.final_layer_norm", head="embed_out"),
        *sublayers(ours, theirs, NAMES, WB),
        *sublayers(ours, theirs, {"self_attn.o_proj": "attention.dense"}, leaves),
        *qkv(spec, f"{theirs}attention.query_key_value", leaves, by_group=True),
    ]


GPT_NEOX = Layout(
    family="gpt_neox",
    architectures={"GPTNeoXForCausalLM": "lm"},
    keys=KEYS,
    translated=(*ROPE, "rotary_emb_base"),
    only={"is_decoder": (True, False, None)},
    harmless=("classifier_dropout",),
    defaults={
        "vocab_size": 50432,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "use_parallel_residual": True,
        "max_position_embeddings": 2048,
        "rotary_pct": 0.25,
        "hidden_act": "gelu",
        "attention_bias": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "layer_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    },
    read=_read,
    write=_write,
    tensors=decoder_names(
        _rules,
        "gpt_neox.",
        "gpt_neox.embed_in",
        head="embed_out",
        unused=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    ),
)
