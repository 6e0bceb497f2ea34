"""Phi (1, 1.5 and 2) as `transformers` stores it (Li et al. 2023, section 2.1): GPT-NeoX's turns, one norm for both
sub-layers, biases everywhere."""

from __future__ import annotations

from typing import Any

from headway.checkpoints.hf.config_keys import DECODER, ConfigReader, FieldMap, gelu_new
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.rules import decoder_names, same
from headway.checkpoints.hf.rope import PARTIAL, ROPE, read_rope, write_rope

KEYS: FieldMap = {
    **DECODER,
    "dropout": ("resid_pdrop", "embd_pdrop"),
    "norm_eps": "layer_norm_eps",
}
MODULES = {
    **{f"self_attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
    "self_attn.o_proj": "self_attn.dense",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
    "input_layernorm": "input_layernorm",
}


def _read(given: ConfigReader, kind: str) -> dict[str, Any]:
    width, heads = given.whole("hidden_size"), given.whole("num_attention_heads")
    return {
        "kv_heads": given.whole("num_key_value_heads", heads),
        **read_rope(given, max(width // heads, 1), share=given.number(PARTIAL)),
    }


PHI = Layout(
    family="phi",
    architectures={"PhiForCausalLM": "lm"},
    keys=KEYS,
    translated=(*ROPE, "num_key_value_heads"),
    only={"qk_layernorm": (False, None)},
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
    write=lambda spec: {
        **write_rope(spec, share=PARTIAL),
        "num_key_value_heads": spec.kv_heads,
        "hidden_act": gelu_new(spec.activation),
    },
    tensors=decoder_names(
        *("", "model.embed_tokens", "model.final_layernorm", "model.layers.#."),
        MODULES,
        more=lambda spec: [same("lm_head.bias", "lm_head.bias")],
    ),
)
