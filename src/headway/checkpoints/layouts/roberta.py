"""RoBERTa as `transformers` stores it (Liu et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.checkpoints.given import Given
from headway.checkpoints.layouts.base import Layout, Rule, sublayers
from headway.checkpoints.layouts.bert import (
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
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.positions import Learned


def _read(given: Given, kind: str) -> dict[str, Any]:
    rows, pad = given.whole("max_position_embeddings"), given.get("pad_token_id")
    if type(pad) is not int or not 0 <= pad < rows - 1:
        raise ConfigError(
            f'config.json: positions of a roberta begin behind row "pad_token_id" of a table of {rows} rows '
            f"(max_position_embeddings), so it must lie in 0..{rows - 2}; got {pad!r}"
        )
    size = rows - pad - 1
    return {
        **read_encoder(given, kind, masked="gelu"),  # whatever hidden_act says
        "positions": Learned(size, offset=pad + 1),
        "trained_context": size,
    }


def _write(spec: ModelSpec) -> dict[str, Any]:
    positions = spec.positions
    size, offset = (positions.size, positions.offset) if isinstance(positions, Learned) else (1, 1)
    return {
        **write_encoder(spec),
        "max_position_embeddings": size + offset,
        "pad_token_id": max(offset, 1) - 1,
    }


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    rules = stack_rules(spec, "roberta.")
    task = spec.head.task
    if task == "masked-lm":
        names = {"dense": "lm_head.dense", "norm": "lm_head.layer_norm", "bias": "lm_head.bias"}
        return [*rules, *masked_rules(spec, {**names, "out": "lm_head.decoder.weight"})]
    if task == "classify" and spec.head.dense is not None:
        names = {"dense": "classifier.dense", "out": "classifier.out_proj"}
        return rules + sublayers("head.", "", names, WB)
    if spec.head.dense is not None:
        rules += sublayers("head.", "", {"dense": "roberta.pooler.dense"}, WB)
    out = "qa_outputs" if task == "answer" else "classifier"
    return rules + (sublayers("head.", "", {"out": out}, WB) if spec.head.outputs else [])


ROBERTA = Layout(
    family="roberta",
    architectures={
        "RobertaForMaskedLM": "masked-lm",
        "RobertaForSequenceClassification": "classify",
        "RobertaForTokenClassification": "tag",
        "RobertaForQuestionAnswering": "answer",
        "RobertaModel": "states",
    },
    translated=(*TRANSLATED, "pad_token_id"),
    only=ONLY,
    harmless=POOLER,
    defaults={**DEFAULTS, "vocab_size": 50265, "pad_token_id": 1},
    read=_read,
    write=_write,
    rules=_rules,
    prefix="roberta.",
    aliases={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    renamed=RENAMED,
    unused=("roberta.pooler.", "embeddings.position_ids"),
    heads=("lm_head.", "classifier.", "qa_outputs."),
)
