"""What BART, mBART and Marian share, as `transformers` stores them: two stacks of one width, and one config with one
activation, one context and one set of dropouts for both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.checkpoints.hf.config_keys import FieldMap, gelu_new
from headway.checkpoints.hf.config_reader import ConfigReader
from headway.checkpoints.hf.layouts.rules import WB, Rule, layered, output, same, sublayers
from headway.models import ModelSpec
from headway.positions import Learned

MODULES = {
    "self_attn.q_proj": "self_attn.q_proj",
    "self_attn.k_proj": "self_attn.k_proj",
    "self_attn.v_proj": "self_attn.v_proj",
    "self_attn.o_proj": "self_attn.out_proj",
    "input_layernorm": "self_attn_layer_norm",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
    "post_attention_layernorm": "final_layer_norm",
}
CROSS = {
    "cross_attn.q_proj": "encoder_attn.q_proj",
    "cross_attn.k_proj": "encoder_attn.k_proj",
    "cross_attn.v_proj": "encoder_attn.v_proj",
    "cross_attn.o_proj": "encoder_attn.out_proj",
    "cross_attention_layernorm": "encoder_attn_layer_norm",
}
SIDES = ("encoder", "decoder")
SHARED = "model.shared.weight"
DECODER: FieldMap = {
    "vocab": "vocab_size",
    "width": "d_model",
    "layers": "decoder_layers",
    "heads": "decoder_attention_heads",
    "hidden": "decoder_ffn_dim",
    "activation": "activation_function",
    "trained_context": "max_position_embeddings",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
    "init_std": "init_std",
    "tied": "tie_word_embeddings",
}
ENCODER: FieldMap = {
    "vocab": "vocab_size",
    "layers": "encoder_layers",
    "heads": "encoder_attention_heads",
    "hidden": "encoder_ffn_dim",
}
ONLY = {
    "is_decoder": (False, None),
    "encoder_layerdrop": (0.0, None),
    "decoder_layerdrop": (0.0, None),
    "add_bias_logits": (False, None),
    "add_cross_attention": (False, None),
    "gradient_checkpointing": (False, None),
}
# heads of other classes, and a second name of encoder_layers that old versions wrote
HARMLESS = (
    *("classifier_dropout", "classif_dropout", "num_hidden_layers", "_num_labels", "extra_pos_embeddings"),
    *("output_past", "force_bos_token_to_be_generated"),
)
DEFAULTS = {
    "vocab_size": 50265,
    "d_model": 1024,
    "max_position_embeddings": 1024,
    "scale_embedding": False,
    "activation_function": "gelu",
    "init_std": 0.02,
    "tie_word_embeddings": True,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    **{f"{side}_layers": 12 for side in SIDES},
    **{f"{side}_attention_heads": 16 for side in SIDES},
    **{f"{side}_ffn_dim": 4096 for side in SIDES},
}


def read_pair(given: ConfigReader) -> dict[str, Any]:
    """The fields of both stacks that are not in the tables."""
    return {"embedding_scale": given.whole("d_model") ** 0.5 if given.flag("scale_embedding") else 1.0}


def write_pair(spec: ModelSpec) -> dict[str, Any]:
    """The keys that `read_pair` reads, and those whose values differ from the tables'."""
    place = spec.positions
    return {
        "max_position_embeddings": place.size if isinstance(place, Learned) else spec.trained_context,
        "scale_embedding": spec.embedding_scale != 1.0,
        "activation_function": gelu_new(spec.activation),
    }


def pair_rules(spec: ModelSpec, norms: Mapping[str, str]) -> Sequence[Rule]:
    """Embeddings, both stacks and the output layer; `norms` are those of each stack that are in no layer."""
    assert spec.encoder is not None
    rules = []
    if spec.output_bias:
        rules.append(
            Rule(
                ("lm_head.bias",),
                "final_logits_bias",
                lambda parts: parts[0][None],
                lambda whole: (whole[0],),
            )
        )
    rules += output(spec)
    for side, one in zip(SIDES, (spec.encoder, spec), strict=True):
        if spec.shared_embedding and one is spec:
            rules.append(same("decoder.embed_tokens.weight", SHARED))
        elif not spec.shared_embedding:
            rules.append(same(f"{side}.embed_tokens.weight", f"model.{side}.embed_tokens.weight"))
        if isinstance(one.positions, Learned):
            rules.append(same(f"{side}.embed_positions.weight", f"model.{side}.embed_positions.weight"))
        modules = MODULES if one is spec.encoder else {**MODULES, **CROSS}
        layers = sublayers(f"{side}.layers.#.", f"model.{side}.layers.#.", modules, WB)
        rules += [*sublayers(f"{side}.", f"model.{side}.", norms, WB), *layered(layers, one.layers)]
    return rules


def pair_aliases(spec: ModelSpec) -> Mapping[str, str]:
    """Second names of the embeddings."""
    if spec.shared_embedding:
        names = [f"model.{side}.embed_tokens.weight" for side in SIDES]
        return dict.fromkeys([*names, *(["lm_head.weight"] if spec.tied else [])], SHARED)
    return {"lm_head.weight": "model.decoder.embed_tokens.weight"} if spec.tied else {}
