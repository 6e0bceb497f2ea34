"""PLBART, MVP, Blenderbot, Pegasus, and M2M100, of which NLLB is a case, as `transformers` stores them: BART with other
positions, norms and defaults (Ahmad et al. 2021; Tang et al. 2022; Roller et al. 2020; Zhang et al. 2019; Fan et al.
2020, NLLB team 2022).
"""

from collections.abc import Mapping
from typing import Any

from headway.checkpoints.hf.config_keys import OLD_GELU, ConfigReader, Key
from headway.checkpoints.hf.layouts.pairs import (
    DECODER,
    POSITIONS,
    bart_aliases,
    bart_layout,
    pair_layout,
    read_pair,
    tables,
    write_pair,
)
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.positions import Learned, Sinusoidal

PRE = (False, False, True, True)
"""`SWITCHES` of norms in front, and none behind the embedding."""
VERSIONS = ("encoder.version", "decoder.version")

PLBART = bart_layout(
    *("plbart", "PLBart"),
    pre=False,
    keys={**DECODER, "attention_dropout": Key("attention_dropout", 0.1)},
    more={"scale_embedding": True},
)
MVP = bart_layout(
    *("mvp", "Mvp"),
    pre=False,
    only={"use_prompt": (False, None)},
    harmless=("prompt_length", "prompt_mid_dim"),
)


def _read_blenderbot(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    place = Learned(fields["trained_context"])
    return {**read_pair(given, fields), "positions": place, "shared_embedding": fields["tied"]}


BLENDERBOT = pair_layout(
    "blenderbot",
    ("BlenderbotForConditionalGeneration", "BlenderbotModel"),
    PRE,
    _read_blenderbot,
    keys={**DECODER, "trained_context": Key("max_position_embeddings", 128)},
    only={
        "layernorm_variant": ("prelayernorm", None),
        "do_blenderbot_90_layernorm": (False, None),
        "extra_layer_norm": (False, None),
    },
    harmless=("unk_token_id",),
    aliases=bart_aliases,
    unused=VERSIONS,
)


def _read_pegasus(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_pair(given, fields), "positions": POSITIONS, "shared_embedding": fields["tied"]}


PEGASUS = pair_layout(
    "pegasus",
    ("PegasusForConditionalGeneration", "PegasusModel"),
    (True, *PRE[1:]),
    _read_pegasus,
    aliases=bart_aliases,
    constants=tables,
    unused=VERSIONS,
)


def _read_m2m_100(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Positions begin behind that of padding. Raises ConfigError for a padding id that is none."""
    pad = given.get("pad_token_id")
    if type(pad) is not int or pad < 0:
        raise ConfigError(
            f'config.json: positions of an m2m_100 begin behind "pad_token_id", so it must be an id; got {pad!r}'
        )
    return {
        **read_pair(given, fields),
        "positions": Sinusoidal(pairing="halves", closed=True, first=pad + 1),
        "shared_embedding": fields["tied"],
    }


def _write_m2m_100(spec: ModelSpec) -> dict[str, Any]:
    place = spec.positions
    first = place.first if isinstance(place, Sinusoidal) else 2
    return {**write_pair(spec), "pad_token_id": max(first, 1) - 1}


M2M_100 = pair_layout(
    "m2m_100",
    ("M2M100ForConditionalGeneration", "M2M100Model"),
    (True, *PRE[1:]),
    _read_m2m_100,
    write=_write_m2m_100,
    keys={
        **DECODER,
        "activation": Key("activation_function", "relu", OLD_GELU),
        "attention_dropout": Key("attention_dropout", 0.1),
    },
    more={"scale_embedding": True, "pad_token_id": 1},
    # training of the published ones left out layers at random; here it does not
    only={"encoder_layerdrop": (0.0, 0.05, None), "decoder_layerdrop": (0.0, 0.05, None)},
    aliases=bart_aliases,
    unused=(*VERSIONS, "embed_positions.weights"),
)
