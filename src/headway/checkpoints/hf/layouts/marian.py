"""Marian as `transformers` stores it (Junczys-Dowmunt et al. 2018; the models of Tiedemann and Thottingal 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.hf.config_reader import ConfigReader
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.pairs import (
    DECODER,
    DEFAULTS,
    ENCODER,
    HARMLESS,
    ONLY,
    SHARED,
    SIDES,
    pair_aliases,
    pair_rules,
    read_pair,
    write_pair,
)
from headway.checkpoints.hf.layouts.rules import TensorNames
from headway.models import ModelSpec
from headway.positions import Sinusoidal

POSITIONS = Sinusoidal(pairing="halves")


def _read(given: ConfigReader, kind: str) -> dict[str, Any]:
    shared = given.flag("share_encoder_decoder_embeddings") and given.flag("tie_word_embeddings")
    vocab = given.whole("vocab_size")
    return {
        **read_pair(given),
        "vocab": vocab if shared else given.whole("decoder_vocab_size", vocab),
        "positions": POSITIONS,
        "shared_embedding": shared,
    }


def _write(spec: ModelSpec) -> dict[str, Any]:
    return {
        **write_pair(spec),
        "decoder_vocab_size": spec.vocab,
        "share_encoder_decoder_embeddings": spec.shared_embedding,
    }


def _tables(spec: ModelSpec) -> Mapping[str, Tensor]:
    """What old files hold of positions."""
    table = POSITIONS.embedding(torch.arange(spec.trained_context), spec.width)
    return {f"model.{side}.embed_positions.weight": table for side in SIDES}


MARIAN = Layout(
    family="marian",
    architectures={"MarianMTModel": "lm", "MarianModel": "lm"},
    keys=DECODER,
    encoder_keys=ENCODER,
    translated=("decoder_vocab_size",),
    only={
        **ONLY,
        "static_position_embeddings": (True, None),
        "normalize_embedding": (False, None),
        "normalize_before": (False, None),
        "add_final_layer_norm": (False, None),
    },
    harmless=HARMLESS,
    defaults={**DEFAULTS, "vocab_size": 58101, "share_encoder_decoder_embeddings": True},
    read=_read,
    write=_write,
    tensors=TensorNames(
        rules=lambda spec: pair_rules(spec, {}),
        aliases=pair_aliases,
        stand_in={"final_logits_bias": None},
        constants=_tables,
        unused=(SHARED,),
        prefix="model.",
    ),
)
