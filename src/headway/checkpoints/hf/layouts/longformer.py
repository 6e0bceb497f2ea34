"""Longformer as `transformers` stores it (Beltagy et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.checkpoints.hf.config_reader import ConfigReader
from headway.checkpoints.hf.layouts.encoders import (
    DEFAULTS,
    LM_HEAD,
    ONLY,
    encoder_layout,
    head_rules,
    read_encoder,
    read_table,
    stack_rules,
    write_encoder,
    write_table,
)
from headway.checkpoints.hf.layouts.rules import Rule
from headway.checkpoints.hf.windows import from_foreign
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.patterns import Global, Pattern
from headway.patterns.primitives import Kind
from headway.patterns.program import interval, without

WINDOW = "huggingface attention_window"
GLOBAL = {
    "self_attn.q_global_proj": "attention.self.query_global",
    "self_attn.k_global_proj": "attention.self.key_global",
    "self_attn.v_global_proj": "attention.self.value_global",
}


def _read(given: ConfigReader, kind: str) -> dict[str, Any]:
    return {
        **read_encoder(given, kind, masked="gelu"),  # hidden_act does not apply here
        **read_table(given, "longformer"),
        "patterns": _patterns(given.get("attention_window"), given.whole("num_hidden_layers")),
    }


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
    return tuple(from_foreign(WINDOW, w) | Global() for w in each)


def _write(spec: ModelSpec) -> dict[str, Any]:
    windows = [_others(pattern) for pattern in spec.patterns]
    return {
        **write_encoder(spec),
        **write_table(spec),
        "attention_window": windows[0] if len(set(windows)) == 1 else windows,
    }


def _others(pattern: Pattern) -> int:
    """w of a window of w / 2 on either side; 2 where there is none, which reading it again will notice."""
    bounds = interval(without(pattern, Kind.GLOBAL_KEYS, Kind.GLOBAL_QUERIES))
    return 2 if bounds is None else 2 * (bounds[0] or 1)


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    head = head_rules(spec, LM_HEAD, "longformer.pooler.dense", deep=True)
    return [*stack_rules(spec, "longformer.", GLOBAL), *head]


LONGFORMER = encoder_layout(
    *("longformer", "Longformer", _read, _write, _rules, LM_HEAD),
    only={
        **ONLY,
        "attention_mode": ("longformer",),
        "ignore_attention_mask": (False,),
        "onnx_export": (False, True, None),
    },
    defaults={**DEFAULTS, "attention_window": 512, "pad_token_id": 1},
)
