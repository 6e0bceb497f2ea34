"""StarCoder2 as `transformers` stores it (Lozhkov et al. 2024, section 5): LLaMA's names, LayerNorm, and two matrices
in the feed-forward."""

from __future__ import annotations

from typing import Any

from headway.checkpoints.hf.config_keys import DECODER, ConfigReader, FieldMap
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.rules import decoder_names
from headway.checkpoints.hf.rope import ROPE, read_rope, write_rope
from headway.checkpoints.hf.windows import from_foreign, last_keys_if_any

KEYS: FieldMap = {
    **DECODER,
    "kv_heads": "num_key_value_heads",
    "qkv_bias": "use_bias",
    "out_bias": "use_bias",
    "mlp_bias": "use_bias",
    "dropout": ("residual_dropout", "embedding_dropout"),
    "norm_eps": "norm_epsilon",
}
SAME = ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{name}_proj" for name in "qkvo"))
MODULES = {**{name: name for name in SAME}, "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}


def _read(given: ConfigReader, kind: str) -> dict[str, Any]:
    width, heads = given.whole("hidden_size"), given.whole("num_attention_heads")
    head_dim = given.whole("head_dim", max(width // heads, 1))
    return {
        "head_dim": head_dim,
        "patterns": from_foreign("huggingface sliding_window", given.get("sliding_window")),
        **read_rope(given, head_dim),
    }


STARCODER2 = Layout(
    family="starcoder2",
    architectures={"Starcoder2ForCausalLM": "lm"},
    keys=KEYS,
    translated=(*ROPE, "head_dim", "sliding_window"),
    only={
        "mlp_type": ("default", None),
        "norm_type": ("layer_norm", None),
        "scale_attn_weights": (True, None),
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
    write=lambda spec: {
        "head_dim": spec.head_dim,
        "sliding_window": last_keys_if_any(spec.patterns[0]),
        **write_rope(spec),
    },
    tensors=decoder_names("", "model.embed_tokens", "model.norm", "model.layers.#.", MODULES),
)
