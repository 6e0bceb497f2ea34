"""RoFormer as `transformers` stores it (Su et al. 2021): BERT with rotary positions in adjacent pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.hf.config_keys import activation
from headway.checkpoints.hf.config_reader import ConfigReader
from headway.checkpoints.hf.layouts.encoders import (
    CLS,
    DEFAULTS,
    encoder_layout,
    head_rules,
    read_encoder,
    stack_rules,
    write_encoder,
)
from headway.checkpoints.hf.layouts.rules import WB, Rule, sublayers
from headway.models import ModelSpec
from headway.positions import Rotary, Sinusoidal

TABLE = "roformer.encoder.embed_positions.weight"
LARGEST_TABLE = 2**26  # numbers


def _read(given: ConfigReader, kind: str) -> dict[str, Any]:
    width = given.whole("hidden_size")
    columns = given.whole("embedding_size", width)
    return {
        **read_encoder(given, kind, dense=activation(given, "hidden_act")),
        "positions": Rotary(pairing="adjacent", values=given.flag("rotary_value")),
        "embedding_width": None if columns == width else columns,
        "trained_context": given.whole("max_position_embeddings"),
    }


def _write(spec: ModelSpec) -> dict[str, Any]:
    return {
        **write_encoder(spec),
        "embedding_size": spec.columns,
        "rotary_value": isinstance(spec.positions, Rotary) and spec.positions.values,
        "max_position_embeddings": spec.trained_context,
    }


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    rules = stack_rules(spec, "roformer.")
    if spec.columns != spec.width:
        rules += sublayers("model.", "roformer.", {"embed_proj": "embeddings_project"}, WB)
    return [*rules, *head_rules(spec, CLS, "classifier.dense", deep=True)]


def _constants(spec: ModelSpec) -> Mapping[str, Tensor]:
    """The sines and cosines of `max_position_embeddings` positions that transformers stores with its weights, and
    makes where they are absent; here, nothing."""
    if spec.trained_context * spec.head_dim > LARGEST_TABLE:
        return {}
    position = torch.arange(spec.trained_context, device="cpu")
    return {TABLE: Sinusoidal(pairing="halves").embedding(position, spec.head_dim)}


ROFORMER = encoder_layout(
    *("roformer", "RoFormer", _read, _write, _rules, CLS),
    translated=("embedding_size", "rotary_value"),
    defaults={**DEFAULTS, "vocab_size": 50000, "max_position_embeddings": 1536},
    unused=("roformer.pooler.",),
    constants=_constants,
    pairing="adjacent",
)
