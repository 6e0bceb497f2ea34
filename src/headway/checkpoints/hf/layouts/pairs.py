"""BART, Marian and related encoder-decoders as `transformers` stores them: two stacks of one width, and one config with
one activation, one context and one set of dropouts for both.

mBART, PLBART and MVP (Lewis et al. 2019; Liu et al. 2020; Ahmad et al. 2021; Tang et al. 2022) have BART's positions,
Blenderbot (Roller et al. 2020) learned ones without its offset; Marian (Junczys-Dowmunt et al. 2018, and the models of
Tiedemann and Thottingal 2020), Pegasus (Zhang et al. 2019) and M2M100, which includes NLLB (Fan et al. 2020; NLLB team
2022), have sines and cosines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.hf.config_keys import OLD_GELU, ConfigReader, FieldMap, Key
from headway.checkpoints.hf.layouts.base import Layout, Part
from headway.checkpoints.hf.layouts.parts import scaled_embedding, table_size
from headway.checkpoints.hf.layouts.rules import Rule, TensorNames, block, lifted, module_rules, same, within
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.positions import Learned, PositionScheme, Sinusoidal

STACK = {
    "embed_tokens": "embed_tokens",
    "embed_positions": "embed_positions",
    "embed_norm": "layernorm_embedding",
    "norm": "layer_norm",
}
"""Modules of both stacks outside of their layers."""
MODULES = {
    **block("self_attn_layer_norm final_layer_norm", "self_attn. q_proj k_proj v_proj out_proj", "fc1 fc2"),
    **{f"cross_attn.{part}_proj": f"encoder_attn.{part}_proj" for part in "qkv"},
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
    **dict.fromkeys(("is_decoder", "add_bias_logits"), (False, None)),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), (0.0, None)),
}
# heads of other classes, and a second name of encoder_layers that old versions wrote
HARMLESS = (
    *("classifier_dropout", "classif_dropout", "num_hidden_layers", "_num_labels", "extra_pos_embeddings"),
    *("output_past", "force_bos_token_to_be_generated"),
)
SWITCHES = ("static_position_embeddings", "normalize_embedding", "normalize_before", "add_final_layer_norm")
"""Keys of code shared by several families; in each family they have one value."""


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    """Returns the rules of embeddings, both stacks and the output layer."""
    rules = [Rule(("lm_head.bias",), "final_logits_bias", changes=(lifted(0),))] if spec.output_bias else []
    rules += [] if spec.tied else [same("lm_head.weight", "lm_head.weight")]
    for side in SIDES:
        modules = within(f"{side}.", f"model.{side}.", {**STACK, **within("layers.#.", "layers.#.", MODULES)})
        if spec.shared_embedding:
            modules[f"{side}.embed_tokens"] = "model.shared"
        rules += module_rules(spec, modules)
    return rules


def _marian_aliases(spec: ModelSpec) -> Mapping[str, str]:
    """Returns second names of the embeddings."""
    if spec.shared_embedding:
        names = [f"model.{side}.embed_tokens.weight" for side in SIDES]
        return dict.fromkeys([*names, *(["lm_head.weight"] if spec.tied else [])], SHARED)
    return {"lm_head.weight": "model.decoder.embed_tokens.weight"} if spec.tied else {}


def _aliases(spec: ModelSpec) -> Mapping[str, str]:
    # if nothing is tied, transformers has a third matrix that is never used, and reports it missing in a file
    return _marian_aliases(spec) or {"model.decoder.embed_tokens.weight": SHARED}


def _tables(spec: ModelSpec) -> Mapping[str, Tensor]:
    """Returns the tables of positions that old files hold."""
    table = SINES.embedding(torch.arange(spec.trained_context), spec.width)
    return {f"model.{side}.embed_positions.weight": table for side in SIDES}


def _positions(scheme: Callable[[Mapping[str, Any]], PositionScheme]) -> Part:
    """Returns the part of positions, from the other fields; if the output is tied, both stacks share the embedding."""
    return Part(
        read=lambda config, fields: {"positions": scheme(fields), "shared_embedding": fields["tied"]},
        write=lambda spec: {"max_position_embeddings": table_size(spec)},
    )


SINES = Sinusoidal(pairing="halves")
SINUSOIDAL = _positions(lambda fields: SINES)
BEHIND_TWO = _positions(lambda fields: Learned(fields["trained_context"], offset=2))
VERSIONS = ("encoder.version", "decoder.version")


def _layout(
    family: str,
    name: str,
    switches: str,
    *parts: Part,
    keys: FieldMap = DECODER,
    scaled: bool = False,
    classes: Sequence[str] = ("ForConditionalGeneration", "Model"),
    only: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
    harmless: Sequence[str] = (),
    **names: Any,
) -> Layout:
    """Returns the layout of an encoder-decoder.

    name: prefix of its class names, `classes` their suffixes.
    switches: the values of `SWITCHES`, y or n for each.
    scaled: default of `scale_embedding`.
    parts, only, harmless: additional ones.
    names: the fields of `TensorNames` that differ."""
    switch = {key: (on == "y", None) for key, on in zip(SWITCHES, switches, strict=True)}
    usual = {"aliases": _aliases, "unused": VERSIONS}
    return Layout(
        family=family,
        architectures={f"{name}{ending}": "lm" for ending in classes},
        keys=keys,
        encoder_keys=ENCODER,
        only={**ONLY, **switch, **only},
        harmless=(*HARMLESS, *harmless),
        parts=(scaled_embedding(scaled), *parts),
        tensors=TensorNames(
            rules=_rules,
            outputs={"lm": "lm_head"},
            stand_in={"final_logits_bias": None},
            prefix="model.",
            **{**usual, **names},
        ),
    )


LESS_SURE = {"attention_dropout": Key("attention_dropout", 0.1)}
BART = _layout("bart", "Bart", "nynn", BEHIND_TWO)
MBART = _layout("mbart", "MBart", "nyyy", BEHIND_TWO)
PLBART = _layout("plbart", "PLBart", "nynn", BEHIND_TWO, keys={**DECODER, **LESS_SURE}, scaled=True)
MVP = _layout(
    *("mvp", "Mvp", "nynn", BEHIND_TWO),
    only={"use_prompt": (False, None)},
    harmless=("prompt_length", "prompt_mid_dim"),
)
BLENDERBOT = _layout(
    *("blenderbot", "Blenderbot", "nnyy", _positions(lambda fields: Learned(fields["trained_context"]))),
    keys={**DECODER, "trained_context": Key("max_position_embeddings", 128)},
    only={
        "layernorm_variant": ("prelayernorm", None),
        **dict.fromkeys(("do_blenderbot_90_layernorm", "extra_layer_norm"), (False, None)),
    },
    harmless=("unk_token_id",),
)
PEGASUS = _layout("pegasus", "Pegasus", "ynyy", SINUSOIDAL, constants=_tables)


def _read_padding(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads positions, which begin after the row of the padding id. Raises ConfigError if that is not a token id."""
    pad = config.get("pad_token_id")
    if type(pad) is not int or pad < 0:
        raise ConfigError(
            f'config.json: "pad_token_id" of an m2m_100 must be a token id (positions begin after it), got {pad!r}'
        )
    return {"positions": Sinusoidal(pairing="halves", closed=True, first=pad + 1)}


def _write_padding(spec: ModelSpec) -> dict[str, Any]:
    first = spec.positions.first if isinstance(spec.positions, Sinusoidal) else 2
    return {"pad_token_id": max(first, 1) - 1}


M2M_100 = _layout(
    *("m2m_100", "M2M100", "ynyy", SINUSOIDAL, Part({"pad_token_id": 1}, _read_padding, _write_padding)),
    keys={**DECODER, **LESS_SURE, "activation": Key("activation_function", "relu", OLD_GELU)},
    scaled=True,
    # the published models were trained with layer dropout, which headway does not have
    only=dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), (0.0, 0.05, None)),
    unused=(*VERSIONS, "embed_positions.weights"),
)


def _read_vocabs(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    shared, vocab = config.flag("share_encoder_decoder_embeddings") and fields["tied"], fields["vocab"]
    return {
        "vocab": vocab if shared else config.whole("decoder_vocab_size", vocab),
        "shared_embedding": shared,
    }


def _write_vocabs(spec: ModelSpec) -> dict[str, Any]:
    return {"decoder_vocab_size": spec.vocab, "share_encoder_decoder_embeddings": spec.shared_embedding}


VOCABS = Part(
    {"decoder_vocab_size": None, "share_encoder_decoder_embeddings": True}, _read_vocabs, _write_vocabs
)
MARIAN = _layout(
    *("marian", "Marian", "ynnn", SINUSOIDAL, VOCABS),
    classes=("MTModel", "Model"),
    aliases=_marian_aliases,
    constants=_tables,
    unused=(SHARED,),
)


def marian_spec(spec: ModelSpec) -> ModelSpec | None:
    """Returns, for an encoder-decoder of family "transformer" (2017), the spec of the Marian model that is the same
    function if its additional biases (of attention and of the output) are 0; None for other models.

    Other properties that Marian cannot express (pre-norm, interleaved sines and cosines, another epsilon) are kept."""
    if spec.family != "transformer" or spec.encoder is None:
        return None
    source, target = (
        replace(stack, family="marian", qkv_bias=True, out_bias=True) for stack in (spec.encoder, spec)
    )
    return replace(target, output_bias=True, encoder=source)
