"""BART, mBART and Marian as `transformers` stores them: two stacks of one width, and one config with one activation,
one context and one set of dropouts for both.

(Lewis et al. 2019; Liu et al. 2020; Junczys-Dowmunt et al. 2018, and the models of Tiedemann and Thottingal 2020.)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.hf.config_keys import OLD_GELU, ConfigReader, FieldMap, Key
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.rules import Rule, TensorNames, module_rules, same, within
from headway.models import ModelSpec
from headway.positions import Learned, Sinusoidal

STACK = {
    "embed_tokens": "embed_tokens",
    "embed_positions": "embed_positions",
    "embed_norm": "layernorm_embedding",
    "norm": "layer_norm",
}
"""Modules of both stacks outside of their layers."""
MODULES = {
    "self_attn.q_proj": "self_attn.q_proj",
    "self_attn.k_proj": "self_attn.k_proj",
    "self_attn.v_proj": "self_attn.v_proj",
    "self_attn.o_proj": "self_attn.out_proj",
    "input_layernorm": "self_attn_layer_norm",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
    "post_attention_layernorm": "final_layer_norm",
    "cross_attn.q_proj": "encoder_attn.q_proj",
    "cross_attn.k_proj": "encoder_attn.k_proj",
    "cross_attn.v_proj": "encoder_attn.v_proj",
    "cross_attn.o_proj": "encoder_attn.out_proj",
    "cross_attention_layernorm": "encoder_attn_layer_norm",
}
SIDES = ("encoder", "decoder")
SHARED = "model.shared.weight"
DECODER: FieldMap = {
    "vocab": Key("vocab_size"),
    "width": Key("d_model"),
    "layers": Key("decoder_layers"),
    "heads": Key("decoder_attention_heads"),
    "hidden": Key("decoder_ffn_dim"),
    "activation": Key("activation_function", "gelu", OLD_GELU),
    "trained_context": Key("max_position_embeddings", 1024),
    "dropout": Key("dropout", 0.1),
    "attention_dropout": Key("attention_dropout", 0.0),
    "activation_dropout": Key("activation_dropout", 0.0),
    "init_std": Key("init_std", 0.02),
    "tied": Key("tie_word_embeddings", True),
}
ENCODER: FieldMap = {
    "vocab": Key("vocab_size"),
    "layers": Key("encoder_layers"),
    "heads": Key("encoder_attention_heads"),
    "hidden": Key("encoder_ffn_dim"),
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
SWITCHES = ("static_position_embeddings", "normalize_embedding", "normalize_before", "add_final_layer_norm")
"""Keys of one code for several families, each of which has one value."""


def read_pair(given: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of both stacks that are not in the tables."""
    return {"embedding_scale": fields["width"] ** 0.5 if given.flag("scale_embedding") else 1.0}


def write_pair(spec: ModelSpec) -> dict[str, Any]:
    """The keys that `read_pair` reads, and those whose values differ from the tables'."""
    place = spec.positions
    return {
        "max_position_embeddings": place.size if isinstance(place, Learned) else spec.trained_context,
        "scale_embedding": spec.embedding_scale != 1.0,
    }


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    """Embeddings, both stacks and the output layer."""
    rules = [Rule(("lm_head.bias",), "final_logits_bias", lifted=0)] if spec.output_bias else []
    rules += [] if spec.tied else [same("lm_head.weight", "lm_head.weight")]
    for side in SIDES:
        modules = within(f"{side}.", f"model.{side}.", {**STACK, **within("layers.#.", "layers.#.", MODULES)})
        if spec.shared_embedding:
            modules[f"{side}.embed_tokens"] = "model.shared"
        rules += module_rules(spec, modules)
    return rules


def _aliases(spec: ModelSpec) -> Mapping[str, str]:
    """Second names of the embeddings."""
    if spec.shared_embedding:
        names = [f"model.{side}.embed_tokens.weight" for side in SIDES]
        return dict.fromkeys([*names, *(["lm_head.weight"] if spec.tied else [])], SHARED)
    return {"lm_head.weight": "model.decoder.embed_tokens.weight"} if spec.tied else {}


def bart_aliases(spec: ModelSpec) -> Mapping[str, str]:
    """Second names of the embeddings of BART."""
    # untied, transformers has a third matrix that nothing reads, and misses it in a file
    return _aliases(spec) or {"model.decoder.embed_tokens.weight": SHARED}


def read_bart(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What `read_pair` reads, and BART's positions."""
    place = Learned(fields["trained_context"], offset=2)
    return {**read_pair(given, fields), "positions": place, "shared_embedding": fields["tied"]}


def pair_layout(
    family: str,
    classes: Sequence[str],
    switches: Sequence[bool],
    read: Callable[[ConfigReader, str, Mapping[str, Any]], dict[str, Any]],
    *,
    write: Callable[[ModelSpec], dict[str, Any]] = write_pair,
    keys: FieldMap = DECODER,
    more: Mapping[str, Any] = MappingProxyType({}),
    only: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
    harmless: Sequence[str] = (),
    **names: Any,
) -> Layout:
    """One of them; `switches` are what `SWITCHES` must be, `only` and `harmless` further keys, `names` the fields of
    `TensorNames` that differ."""
    switch = {key: (value, None) for key, value in zip(SWITCHES, switches, strict=True)}
    return Layout(
        family=family,
        architectures=dict.fromkeys(classes, "lm"),
        keys=keys,
        encoder_keys=ENCODER,
        more={"scale_embedding": False, **more},
        only={**ONLY, **switch, **only},
        harmless=(*HARMLESS, *harmless),
        read=read,
        write=write,
        tensors=TensorNames(
            rules=_rules,
            outputs={"lm": "lm_head"},
            stand_in={"final_logits_bias": None},
            prefix="model.",
            **names,
        ),
    )


def bart_layout(family: str, name: str, *, pre: bool, **more: Any) -> Layout:
    """BART, and those that are BART under another name; `more` as in `pair_layout`."""
    classes, switches = (f"{name}ForConditionalGeneration", f"{name}Model"), (False, True, pre, pre)
    unused = ("encoder.version", "decoder.version")
    return pair_layout(family, classes, switches, read_bart, aliases=bart_aliases, unused=unused, **more)


BART, MBART = bart_layout("bart", "Bart", pre=False), bart_layout("mbart", "MBart", pre=True)
POSITIONS = Sinusoidal(pairing="halves")


def _read_marian(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    shared = given.flag("share_encoder_decoder_embeddings") and fields["tied"]
    vocab = fields["vocab"]
    return {
        **read_pair(given, fields),
        "vocab": vocab if shared else given.whole("decoder_vocab_size", vocab),
        "positions": POSITIONS,
        "shared_embedding": shared,
    }


def tables(spec: ModelSpec) -> Mapping[str, Tensor]:
    """What old files hold of positions."""
    table = POSITIONS.embedding(torch.arange(spec.trained_context), spec.width)
    return {f"model.{side}.embed_positions.weight": table for side in SIDES}


MARIAN = pair_layout(
    "marian",
    ("MarianMTModel", "MarianModel"),
    (True, False, False, False),
    _read_marian,
    write=lambda spec: {
        **write_pair(spec),
        "decoder_vocab_size": spec.vocab,
        "share_encoder_decoder_embeddings": spec.shared_embedding,
    },
    more={"decoder_vocab_size": None, "share_encoder_decoder_embeddings": True},
    aliases=_aliases,
    constants=tables,
    unused=(SHARED,),
)


def marian_spec(spec: ModelSpec) -> ModelSpec | None:
    """The spec of the Marian model that computes what a translator of 2017 does where its biases of attention and of
    the output, which that has not, are 0; None for other models.

    What else Marian cannot express (norms in front, cosines between sines, another epsilon) is as it was."""
    if spec.family != "transformer" or spec.encoder is None:
        return None
    source, target = (
        replace(one, family="marian", qkv_bias=True, out_bias=True) for one in (spec.encoder, spec)
    )
    return replace(target, output_bias=True, encoder=source)
