"""Longformer as `transformers` stores it (Beltagy et al. 2020)."""

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
from headway.checkpoints.windows import from_foreign
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.patterns import Global, Or, Pattern, Window
from headway.positions import Learned

WINDOW = "huggingface attention_window"
GLOBAL = {
    "self_attn.q_global_proj": "attention.self.query_global",
    "self_attn.k_global_proj": "attention.self.key_global",
    "self_attn.v_global_proj": "attention.self.value_global",
}


def _read(given: Given, kind: str) -> dict[str, Any]:
    fields = read_encoder(given, kind, masked="gelu")  # whatever hidden_act says
    rows, pad = given.whole("max_position_embeddings"), given.get("pad_token_id")
    if isinstance(pad, bool) or not isinstance(pad, int) or not 0 <= pad < rows - 1:
        raise ConfigError(
            'config.json: positions of a longformer begin behind row "pad_token_id" of its table of '
            f"{rows} (max_position_embeddings), so that must be a whole number below {rows - 1}; got {pad!r}"
        )
    size = rows - pad - 1
    return {
        **fields,
        "positions": Learned(size, offset=pad + 1),
        "trained_context": size,
        "patterns": _patterns(given.get("attention_window"), fields["layers"]),
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
    positions = spec.positions
    table = positions if isinstance(positions, Learned) else Learned(spec.trained_context)
    offset = max(table.offset, 1)
    windows = [_others(pattern) for pattern in spec.patterns]
    return {
        **write_encoder(spec),
        "max_position_embeddings": table.size + offset,
        "pad_token_id": offset - 1,
        "attention_window": windows[0] if len(set(windows)) == 1 else windows,
    }


def _others(pattern: Pattern) -> int:
    """w of a window of w / 2 on either side; 2 where there is none, which reading it again will notice."""
    parts = pattern.parts if isinstance(pattern, Or) else (pattern,)
    return max((2 * p.before for p in parts if isinstance(p, Window)), default=0) or 2


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    rules, head = stack_rules(spec, "longformer.", GLOBAL), spec.head
    if head.task == "masked-lm":
        names = {"dense": "lm_head.dense", "norm": "lm_head.layer_norm", "bias": "lm_head.bias"}
        return [*rules, *masked_rules(spec, {**names, "out": "lm_head.decoder.weight"})]
    places = {"classify": ("classifier.dense", "classifier.out_proj"), "answer": ("", "qa_outputs")}
    dense, out = places.get(head.task, ("longformer.pooler.dense", "classifier"))
    names = {"dense": dense} if head.dense is not None else {}
    return rules + sublayers("head.", "", {**names, "out": out} if head.outputs else names, WB)


LONGFORMER = Layout(
    family="longformer",
    architectures={
        "LongformerForMaskedLM": "masked-lm",
        "LongformerForSequenceClassification": "classify",
        "LongformerForTokenClassification": "tag",
        "LongformerForQuestionAnswering": "answer",
        "LongformerModel": "states",
    },
    translated=(*TRANSLATED, "attention_window", "pad_token_id"),
    only={
        **ONLY,
        "attention_mode": ("longformer",),
        "ignore_attention_mask": (False,),
        "onnx_export": (False, True, None),
    },
    harmless=POOLER,
    defaults={**DEFAULTS, "attention_window": 512, "pad_token_id": 1},
    read=_read,
    write=_write,
    rules=_rules,
    prefix="longformer.",
    aliases={
        "lm_head.decoder.weight": "longformer.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    renamed=RENAMED,
    unused=("longformer.pooler.", "embeddings.position_ids"),
    heads=("lm_head.", "classifier.", "qa_outputs."),
)
