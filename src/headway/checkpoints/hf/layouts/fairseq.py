"""Decoders with fairseq's names, as `transformers` stores them: OPT (Zhang et al. 2022) and BioGPT (Luo et al. 2022)
with a learned table of positions, XGLM (Lin et al. 2021) with sines and cosines; all use rows from 2 on."""

from collections.abc import Mapping
from typing import Any

from headway.checkpoints.hf.config_keys import SIZES, ConfigReader, Key, called
from headway.checkpoints.hf.layouts.base import Layout, Part
from headway.checkpoints.hf.layouts.parts import learned, scaled_embedding
from headway.checkpoints.hf.layouts.rules import block, decoder_names
from headway.errors import ConfigError
from headway.models import ModelSpec

MODULES = block(
    "self_attn_layer_norm final_layer_norm", "self_attn. q_proj k_proj v_proj out_proj", "fc1 fc2"
)
KEYS = {
    **SIZES,
    "hidden": Key("ffn_dim"),
    "dropout": Key("dropout", 0.1),
    "init_std": Key("init_std", 0.02),
    "tied": Key("tie_word_embeddings", True),
}
NONE = (0.0, None)


def _read_opt(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    width = fields["width"]
    if config.get("word_embed_proj_dim") not in (None, width):
        raise ConfigError(
            f"config.json: word_embed_proj_dim {config.get('word_embed_proj_dim')} is unsupported; it must equal "
            f"hidden_size {width}"
        )
    return {"final_norm": fields["order"] == "pre" and not config.flag("_remove_final_layer_norm")}


def _write_opt(spec: ModelSpec) -> dict[str, Any]:
    removed = spec.order == "pre" and not spec.final_norm
    return {"word_embed_proj_dim": spec.width, "_remove_final_layer_norm": removed}


OPT = Layout(
    family="opt",
    architectures={"OPTForCausalLM": "lm"},
    keys={
        **KEYS,
        "order": Key("do_layer_norm_before", True, {True: "pre", False: "post"}),
        "activation": Key("activation_function", "relu"),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), Key("enable_bias", True)),
        "attention_dropout": Key("attention_dropout", 0.0),
    },
    only={"layer_norm_elementwise_affine": (True, None), "layerdrop": NONE, "activation_dropout": NONE},
    parts=(
        learned(2048, offset=2),
        Part({"word_embed_proj_dim": None, "_remove_final_layer_norm": None}, _read_opt, _write_opt),
    ),
    tensors=decoder_names(
        *(
            "model.",
            "model.decoder.embed_tokens",
            "model.decoder.final_layer_norm",
            "model.decoder.layers.#.",
        ),
        MODULES,
        top={"model.embed_positions": "model.decoder.embed_positions"},
    ),
)
BIOGPT = Layout(
    family="biogpt",
    architectures={"BioGptForCausalLM": "lm"},
    keys={
        **SIZES,
        "activation": Key("hidden_act", "gelu"),
        "dropout": Key("hidden_dropout_prob", 0.1),
        "attention_dropout": Key("attention_probs_dropout_prob", 0.1),
        "activation_dropout": Key("activation_dropout", 0.0),
        "tied": Key("tie_word_embeddings", True),
    },
    only={"layerdrop": NONE},
    harmless=("layer_norm_eps",),  # its norms always use 1e-5
    parts=(learned(1024, offset=2), scaled_embedding(True)),
    tensors=decoder_names(
        *("biogpt.", "biogpt.embed_tokens", "biogpt.layer_norm", "biogpt.layers.#.", MODULES),
        top={"model.embed_positions": "biogpt.embed_positions"},
        head="output_projection",
        output="output_projection",
    ),
)


def _check_pad(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    pad = config.get("pad_token_id")
    if pad not in (None, 0, 1):
        raise ConfigError(
            f'config.json: "pad_token_id" of an xglm must be 0 or 1, because its row of the position table is zero and '
            f"must precede the first token; got {pad}"
        )
    return {}


XGLM = Layout(
    family="xglm",
    architectures={"XGLMForCausalLM": "lm"},
    keys={
        **called(KEYS, width="d_model", layers="num_layers", heads="attention_heads"),
        "trained_context": Key("max_position_embeddings", 2048),
        "activation": Key("activation_function", "gelu"),
        "attention_dropout": Key("attention_dropout", 0.1),
        "activation_dropout": Key("activation_dropout", 0.0),
    },
    only={"layerdrop": NONE},
    parts=(scaled_embedding(True), Part({"pad_token_id": 1}, _check_pad)),
    tensors=decoder_names(
        *("model.", "model.embed_tokens", "model.layer_norm", "model.layers.#.", MODULES),
        unused=("embed_positions.weights",),
    ),
)
