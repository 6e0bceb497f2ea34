"""RoFormer as `transformers` stores it (Su et al. 2021): BERT with rotary positions in adjacent pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.given import Given
from headway.checkpoints.layouts.base import Layout, Rule, sublayers
from headway.checkpoints.layouts.bert import (
    ACTS,
    DEFAULTS,
    ONLY,
    POOLER,
    RENAMED,
    TRANSLATED,
    WB,
    masked_rules,
    read_encoder,
    stack_rules,
    write_encoder,
)
from headway.models import ModelSpec
from headway.positions import Rotary, Sinusoidal

TABLE = "roformer.encoder.embed_positions.weight"
LARGEST_TABLE = 2**26  # numbers


def _read(given: Given, kind: str) -> dict[str, Any]:
    act = given.text("hidden_act")
    fields = read_encoder(given, kind, dense=ACTS.get(act, act))
    columns = given.whole("embedding_size", fields["width"])
    return {
        **fields,
        "positions": Rotary(pairing="adjacent", values=given.flag("rotary_value")),
        "embedding_width": None if columns == fields["width"] else columns,
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
    if spec.head.task == "masked-lm":
        top = "cls.predictions."
        names = {"dense": f"{top}transform.dense", "norm": f"{top}transform.LayerNorm", "bias": f"{top}bias"}
        return [*rules, *masked_rules(spec, {**names, "out": f"{top}decoder.weight"})]
    if spec.head.dense is not None:
        names = {"dense": "classifier.dense", "out": "classifier.out_proj"}
        return rules + sublayers("head.", "", names if spec.head.outputs else {"dense": names["dense"]}, WB)
    out = "qa_outputs" if spec.head.task == "answer" else "classifier"
    return rules + (sublayers("head.", "", {"out": out}, WB) if spec.head.outputs else [])


def _constants(spec: ModelSpec) -> Mapping[str, Tensor]:
    """The sines and cosines of `max_position_embeddings` positions that transformers keeps beside its weights, and
    makes where they are absent; here, nothing."""
    if spec.trained_context * spec.head_dim > LARGEST_TABLE:
        return {}
    position = torch.arange(spec.trained_context, device="cpu")
    return {TABLE: Sinusoidal(pairing="halves").embedding(position, spec.head_dim)}


ROFORMER = Layout(
    family="roformer",
    architectures={
        "RoFormerForMaskedLM": "masked-lm",
        "RoFormerForSequenceClassification": "classify",
        "RoFormerForTokenClassification": "tag",
        "RoFormerForQuestionAnswering": "answer",
        "RoFormerModel": "states",
    },
    translated=(*TRANSLATED, "embedding_size", "rotary_value"),
    only=ONLY,
    harmless=POOLER,
    defaults={**DEFAULTS, "vocab_size": 50000, "max_position_embeddings": 1536},
    read=_read,
    write=_write,
    rules=_rules,
    prefix="roformer.",
    aliases={
        "cls.predictions.decoder.weight": "roformer.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    renamed=RENAMED,
    unused=("roformer.pooler.",),
    heads=("cls.", "classifier.", "qa_outputs."),
    constants=_constants,
    pairing="adjacent",
)
