"""Decoders with sines and cosines added to their embeddings, as `transformers` stores them: CTRL (Keskar et al. 2019)
and XGLM (Lin et al. 2021), whose table begins at row 2."""

from collections.abc import Mapping
from typing import Any

from headway.checkpoints.hf.config_keys import SIZES, ConfigReader, Key
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.gpt2 import SUMMARY
from headway.checkpoints.hf.layouts.learned import FAIRSEQ
from headway.checkpoints.hf.layouts.rules import decoder_names
from headway.errors import ConfigError

CTRL = Layout(
    family="ctrl",
    architectures={"CTRLLMHeadModel": "lm"},
    keys={
        "vocab": Key("vocab_size"),
        "width": Key("n_embd"),
        "layers": Key("n_layer"),
        "heads": Key("n_head"),
        "kv_heads": Key("n_head"),
        "hidden": Key("dff"),
        "trained_context": Key("n_positions", 256),
        "dropout": Key(("resid_pdrop", "embd_pdrop"), 0.1),
        "init_std": Key("initializer_range", 0.02),
        "tied": Key("tie_word_embeddings", True),
    },
    only={
        "layer_norm_epsilon": (1e-6, None),
        "attn_pdrop": (0.0, 0.1, None),
    },  # which its layers do not look at
    harmless=("n_ctx", *SUMMARY),
    read=lambda given, kind, fields: {
        "embedding_scale": fields["width"] ** 0.5,
        "max_context": fields["trained_context"],
    },
    tensors=decoder_names(
        *("transformer.", "transformer.w", "transformer.layernorm", "transformer.h.#."),
        {
            **{f"self_attn.{part}_proj": f"multi_head_attention.W{part}" for part in "qkv"},
            "self_attn.o_proj": "multi_head_attention.dense",
            "input_layernorm": "layernorm1",
            "post_attention_layernorm": "layernorm2",
            "mlp.up_proj": "ffn.0",
            "mlp.down_proj": "ffn.2",
        },
    ),
)


def _read_xglm(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    pad = given.get("pad_token_id")
    if pad not in (None, 0, 1):
        raise ConfigError(
            f'config.json: row "pad_token_id" of the positions of an xglm is 0, and {pad} is the row of a token; it '
            "must be 0 or 1, in front of the first"
        )
    return {"embedding_scale": fields["width"] ** 0.5 if given.flag("scale_embedding") else 1.0}


XGLM = Layout(
    family="xglm",
    architectures={"XGLMForCausalLM": "lm"},
    keys={
        **SIZES,
        "width": Key("d_model"),
        "layers": Key("num_layers"),
        "heads": Key("attention_heads"),
        "kv_heads": Key("attention_heads"),
        "hidden": Key("ffn_dim"),
        "trained_context": Key("max_position_embeddings", 2048),
        "activation": Key("activation_function", "gelu"),
        "dropout": Key("dropout", 0.1),
        "attention_dropout": Key("attention_dropout", 0.1),
        "activation_dropout": Key("activation_dropout", 0.0),
        "init_std": Key("init_std", 0.02),
        "tied": Key("tie_word_embeddings", True),
    },
    more={"scale_embedding": True, "pad_token_id": 1},
    only={"layerdrop": (0.0, None), "add_cross_attention": (False, None)},
    read=_read_xglm,
    write=lambda spec: {"scale_embedding": spec.embedding_scale != 1.0},
    tensors=decoder_names(
        *("model.", "model.embed_tokens", "model.layer_norm", "model.layers.#.", FAIRSEQ),
        unused=("embed_positions.weights",),
    ),
)
