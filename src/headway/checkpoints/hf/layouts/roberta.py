"""RoBERTa as `transformers` stores it (Liu et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.checkpoints.hf.config_reader import ConfigReader
from headway.checkpoints.hf.layouts.encoders import (
    DEFAULTS,
    LM_HEAD,
    encoder_layout,
    head_rules,
    read_encoder,
    read_table,
    stack_rules,
    write_encoder,
    write_table,
)
from headway.checkpoints.hf.layouts.rules import Rule
from headway.models import ModelSpec


def _read(given: ConfigReader, kind: str) -> dict[str, Any]:
    head = read_encoder(given, kind, masked="gelu")  # hidden_act does not apply here
    return {**head, **read_table(given, "roberta")}


def _write(spec: ModelSpec) -> dict[str, Any]:
    return {**write_encoder(spec), **write_table(spec)}


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    head = head_rules(spec, LM_HEAD, "roberta.pooler.dense", deep=True)
    return [*stack_rules(spec, "roberta."), *head]


ROBERTA = encoder_layout(
    *("roberta", "Roberta", _read, _write, _rules, LM_HEAD),
    defaults={**DEFAULTS, "vocab_size": 50265, "pad_token_id": 1},
)
