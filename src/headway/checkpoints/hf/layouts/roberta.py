"""RoBERTa and Longformer as `transformers` stores them (Liu et al. 2019; Beltagy et al. 2020)."""

from collections.abc import Mapping
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader
from headway.checkpoints.hf.layouts.encoders import (
    LM_HEAD,
    MODULES,
    MORE,
    ONLY,
    encoder_layout,
    read_encoder,
    write_encoder,
)
from headway.checkpoints.hf.windows import from_foreign
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.patterns import Global, Pattern
from headway.patterns.primitives import Kind
from headway.patterns.program import interval, without
from headway.positions import Learned

CLASSIFIER = {"dense": "classifier.dense", "out": "classifier.out_proj"}
GLOBAL = {
    "self_attn.q_global_proj": "attention.self.query_global",
    "self_attn.k_global_proj": "attention.self.key_global",
    "self_attn.v_global_proj": "attention.self.value_global",
}


def read_roberta(
    given: ConfigReader, kind: str, fields: Mapping[str, Any], family: str = "roberta"
) -> dict[str, Any]:
    """What `read_encoder` reads, and positions, which begin behind the row of padding. Raises ConfigError for a padding
    id that leaves no rows."""
    rows, pad = given.whole("max_position_embeddings"), given.get("pad_token_id")
    if type(pad) is not int or not 0 <= pad < rows - 1:
        raise ConfigError(
            f'config.json: positions of a {family} begin behind row "pad_token_id" of a table of {rows} rows '
            f"(max_position_embeddings), so it must be in 0..{rows - 2}; got {pad!r}"
        )
    size = rows - pad - 1
    return {
        **read_encoder(given, kind, masked="gelu"),  # hidden_act does not apply here
        "positions": Learned(size, offset=pad + 1),
        "trained_context": size,
    }


def write_roberta(spec: ModelSpec) -> dict[str, Any]:
    """The keys that `read_roberta` reads."""
    table = spec.positions if isinstance(spec.positions, Learned) else Learned(spec.trained_context)
    offset = max(table.offset, 1)
    keys = {"max_position_embeddings": table.size + offset, "pad_token_id": offset - 1}
    return {**write_encoder(spec), **keys}


ROBERTA = encoder_layout(
    *("roberta", "Roberta", read_roberta, write_roberta, LM_HEAD),
    classifier=CLASSIFIER,
    more={**MORE, "pad_token_id": 1},
    decoder="ForCausalLM",
)


def _read_longformer(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    windows = _patterns(given.get("attention_window"), fields["layers"])
    return {**read_roberta(given, kind, fields, "longformer"), "patterns": windows}


def _patterns(windows: object, layers: int) -> tuple[Pattern, ...]:
    """One window for all layers, or a list with one for each."""
    each = windows if isinstance(windows, list) else [windows] * layers
    if len(each) != layers:
        raise ConfigError(
            f"config.json: attention_window lists {len(each)} layers, but num_hidden_layers is {layers}"
        )
    if None in each:
        raise ConfigError(
            "config.json: every layer of a longformer has an attention_window, got null; for one that sees all, "
            "take a window of twice the longest row"
        )
    return tuple(from_foreign("attention_window", w) | Global() for w in each)


def _write_longformer(spec: ModelSpec) -> dict[str, Any]:
    windows = [_others(pattern) for pattern in spec.patterns]
    return {**write_roberta(spec), "attention_window": windows[0] if len(set(windows)) == 1 else windows}


def _others(pattern: Pattern) -> int:
    """w of a window of w / 2 on either side; 2 where there is none, which reading it again will notice."""
    bounds = interval(without(pattern, Kind.GLOBAL_KEYS, Kind.GLOBAL_QUERIES))
    return 2 if bounds is None else 2 * (bounds[0] or 1)


LONGFORMER = encoder_layout(
    *("longformer", "Longformer", _read_longformer, _write_longformer, LM_HEAD),
    classifier=CLASSIFIER,
    modules={**MODULES, **GLOBAL},
    only={
        **ONLY,
        "attention_mode": ("longformer",),
        "ignore_attention_mask": (False,),
        "onnx_export": (False, True, None),
    },
    more={**MORE, "attention_window": 512, "pad_token_id": 1},
)
