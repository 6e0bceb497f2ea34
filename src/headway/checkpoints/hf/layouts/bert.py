"""BERT as `transformers` stores it (Devlin et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.checkpoints.hf.config_reader import ConfigReader
from headway.checkpoints.hf.layouts.encoders import (
    CLASSES,
    CLS,
    encoder_layout,
    head_rules,
    read_encoder,
    stack_rules,
    write_encoder,
)
from headway.checkpoints.hf.layouts.rules import Rule
from headway.models import ModelSpec
from headway.positions import Learned


def _read(given: ConfigReader, kind: str) -> dict[str, Any]:
    size = given.whole("max_position_embeddings")
    return {**read_encoder(given, kind), "positions": Learned(size), "trained_context": size}


def _write(spec: ModelSpec) -> dict[str, Any]:
    size = spec.positions.size if isinstance(spec.positions, Learned) else spec.trained_context
    return {**write_encoder(spec), "max_position_embeddings": size}


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    return [*stack_rules(spec, "bert."), *head_rules(spec, CLS, "bert.pooler.dense")]


BERT = encoder_layout(
    *("bert", "Bert", _read, _write, _rules, CLS),
    architectures={
        f"Bert{ending}": kind for ending, kind in {**CLASSES, "ForPreTraining": "masked-lm"}.items()
    },
    also=("wobert",),
    unused=("cls.seq_relationship.", "bert.pooler.", "embeddings.position_ids"),
)
