"""BART and mBART as `transformers` stores them (Lewis et al. 2019; Liu et al. 2020), and what Marian has in common.

A config has one width, one activation, one context and one set of dropouts for both stacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from headway.checkpoints.given import Given
from headway.checkpoints.layouts.base import Layout, Rule, layered, same, sublayers
from headway.checkpoints.layouts.bert import ACTS, WB
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
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")
SIDE = {"layers": "layers", "heads": "attention_heads", "hidden": "ffn_dim"}
TRANSLATED = (
    *("vocab_size", "d_model", "max_position_embeddings", "scale_embedding", "activation_function"),
    *("init_std", "tie_word_embeddings", *DROPOUTS),
    *(f"{side}_{key}" for side in SIDES for key in SIDE.values()),
)
ONLY = {
    "is_encoder_decoder": (True, None),
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


def read_pair(given: Given, family: str, **own: Any) -> dict[str, Any]:
    """The decoder's fields, its encoder among them, by the keys of BART, mBART and Marian; `own` are the family's."""
    act = given.text("activation_function")
    width, tied = given.whole("d_model"), given.flag("tie_word_embeddings")
    both: dict[str, Any] = {
        "vocab": given.whole("vocab_size"),
        "width": width,
        "embedding_scale": width**0.5 if given.flag("scale_embedding") else 1.0,
        "activation": ACTS.get(act, act),
        "init_std": given.number("init_std"),
        "trained_context": given.whole("max_position_embeddings"),
        "tied": tied,
        "shared_embedding": tied,
        **{name: given.number(name) for name in DROPOUTS},
    }
    encoder, decoder = ({ours: given.whole(f"{side}_{key}") for ours, key in SIDE.items()} for side in SIDES)
    spec = ModelSpec.of_pair(
        family, encoder={**encoder, "vocab": both["vocab"]}, **{**both, **decoder, **own}
    )
    return {f.name: getattr(spec, f.name) for f in fields(spec) if f.name != "family"}


def write_pair(spec: ModelSpec) -> dict[str, Any]:
    """The keys that `read_pair` reads."""
    assert spec.encoder is not None
    place = spec.positions
    return {
        "vocab_size": spec.encoder.vocab,
        "d_model": spec.width,
        "max_position_embeddings": place.size if isinstance(place, Learned) else spec.trained_context,
        "scale_embedding": spec.embedding_scale != 1.0,
        "activation_function": {v: k for k, v in reversed(ACTS.items())}[spec.activation],
        "init_std": spec.init_std,
        "tie_word_embeddings": spec.tied,
        "is_encoder_decoder": True,
        **{name: getattr(spec, name) for name in DROPOUTS},
        **{
            f"{side}_{key}": getattr(one, ours)
            for side, one in zip(SIDES, (spec.encoder, spec), strict=True)
            for ours, key in SIDE.items()
        },
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
    if not spec.tied:
        rules.append(same("lm_head.weight", "lm_head.weight"))
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


def _aliases(spec: ModelSpec) -> Mapping[str, str]:
    # untied, transformers has a third matrix that nothing reads, and misses it in a file
    return pair_aliases(spec) or {"model.decoder.embed_tokens.weight": SHARED}


def _read(family: str, given: Given, kind: str) -> dict[str, Any]:
    return read_pair(given, family, positions=Learned(given.whole("max_position_embeddings"), offset=2))


def _layout(family: str, name: str, norms: Mapping[str, str], only: Mapping[str, tuple[Any, ...]]) -> Layout:
    return Layout(
        family=family,
        architectures={f"{name}ForConditionalGeneration": "lm", f"{name}Model": "lm"},
        translated=TRANSLATED,
        only={
            **ONLY,
            "static_position_embeddings": (False, None),
            "normalize_embedding": (True, None),
            **only,
        },
        harmless=HARMLESS,
        defaults=DEFAULTS,
        read=partial(_read, family),
        write=write_pair,
        rules=lambda spec: pair_rules(spec, norms),
        aliases=_aliases,
        stand_in={"final_logits_bias": None},
        unused=("encoder.version", "decoder.version"),
        prefix="model.",
    )


NORM = {"embed_norm": "layernorm_embedding"}
BART = _layout(
    "bart", "Bart", NORM, {"normalize_before": (False, None), "add_final_layer_norm": (False, None)}
)
MBART = _layout(
    *("mbart", "MBart", {**NORM, "norm": "layer_norm"}),
    {"normalize_before": (True, None), "add_final_layer_norm": (True, None)},
)
