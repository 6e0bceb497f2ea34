"""BART and mBART as `transformers` stores them (Lewis et al. 2019; Liu et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.checkpoints.hf.config_reader import ConfigReader
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.pairs import (
    DECODER,
    DEFAULTS,
    ENCODER,
    HARMLESS,
    ONLY,
    SHARED,
    pair_aliases,
    pair_rules,
    read_pair,
    write_pair,
)
from headway.checkpoints.hf.layouts.rules import TensorNames
from headway.models import ModelSpec
from headway.positions import Learned


def _aliases(spec: ModelSpec) -> Mapping[str, str]:
    # untied, transformers has a third matrix that nothing reads, and misses it in a file
    return pair_aliases(spec) or {"model.decoder.embed_tokens.weight": SHARED}


def _read(given: ConfigReader, kind: str) -> dict[str, Any]:
    place = Learned(given.whole("max_position_embeddings"), offset=2)
    return {**read_pair(given), "positions": place, "shared_embedding": given.flag("tie_word_embeddings")}


def _layout(family: str, name: str, norms: Mapping[str, str], only: Mapping[str, tuple[Any, ...]]) -> Layout:
    return Layout(
        family=family,
        architectures={f"{name}ForConditionalGeneration": "lm", f"{name}Model": "lm"},
        keys=DECODER,
        encoder_keys=ENCODER,
        only={
            **ONLY,
            "static_position_embeddings": (False, None),
            "normalize_embedding": (True, None),
            **only,
        },
        harmless=HARMLESS,
        defaults=DEFAULTS,
        read=_read,
        write=write_pair,
        tensors=TensorNames(
            rules=lambda spec: pair_rules(spec, norms),
            aliases=_aliases,
            stand_in={"final_logits_bias": None},
            unused=("encoder.version", "decoder.version"),
            prefix="model.",
        ),
    )


NORM = {"embed_norm": "layernorm_embedding"}
BART = _layout(
    "bart", "Bart", NORM, {"normalize_before": (False, None), "add_final_layer_norm": (False, None)}
)
MBART = _layout(
    *("mbart", "MBart", {**NORM, "norm": "layer_norm"}),
    {"normalize_before": (True, None), "add_final_layer_norm": (True, None)},
)
