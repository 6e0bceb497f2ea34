"""BERT, and RoFormer, which is BERT with rotary positions in adjacent pairs, as `transformers` stores them (Devlin et
al. 2019; Su et al. 2021)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.hf.config_keys import ConfigReader
from headway.checkpoints.hf.layouts.encoders import (
    CLASSES,
    CLS,
    MORE,
    encoder_layout,
    read_encoder,
    write_encoder,
)
from headway.models import ModelSpec
from headway.positions import Learned, Rotary, Sinusoidal

LARGEST_TABLE = 2**26  # numbers


def read_bert(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What `read_encoder` reads, and the table of positions."""
    return {**read_encoder(given, kind), **read_table(given)}


def read_table(given: ConfigReader) -> dict[str, Any]:
    """The table of positions, and the context."""
    size = given.whole("max_position_embeddings")
    return {"positions": Learned(size), "trained_context": size}


def write_bert(spec: ModelSpec) -> dict[str, Any]:
    """The keys that `read_bert` reads."""
    size = spec.positions.size if isinstance(spec.positions, Learned) else spec.trained_context
    return {**write_encoder(spec), "max_position_embeddings": size}


BERT = encoder_layout(
    *("bert", "Bert", read_bert, write_bert, CLS),
    classifier={"dense": "bert.pooler.dense", "out": "classifier"},
    architectures={
        f"Bert{ending}": kind for ending, kind in {**CLASSES, "ForPreTraining": "masked-lm"}.items()
    },
    also=("wobert",),
    decoder="LMHeadModel",
    unused=("cls.seq_relationship.", "bert.pooler.", "embeddings.position_ids"),
)


def _read_roformer(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    width = fields["width"]
    columns = given.whole("embedding_size", width)
    return {
        **read_encoder(given, kind, dense=fields["activation"]),
        "positions": Rotary(pairing="adjacent", values=given.flag("rotary_value")),
        "embedding_width": None if columns == width else columns,
        "trained_context": given.whole("max_position_embeddings"),
    }


def _write_roformer(spec: ModelSpec) -> dict[str, Any]:
    return {
        **write_encoder(spec),
        "embedding_size": spec.columns,
        "rotary_value": isinstance(spec.positions, Rotary) and spec.positions.values,
        "max_position_embeddings": spec.trained_context,
    }


def _constants(spec: ModelSpec) -> Mapping[str, Tensor]:
    """The sines and cosines of `max_position_embeddings` positions that transformers stores with its weights, and
    makes where they are absent; here, nothing."""
    if spec.trained_context * spec.head_dim > LARGEST_TABLE:
        return {}
    position = torch.arange(spec.trained_context, device="cpu")
    return {
        "roformer.encoder.embed_positions.weight": Sinusoidal(pairing="halves").embedding(
            position, spec.head_dim
        )
    }


ROFORMER = encoder_layout(
    *("roformer", "RoFormer", _read_roformer, _write_roformer, CLS),
    classifier={"dense": "classifier.dense", "out": "classifier.out_proj"},
    more={**MORE, "embedding_size": None, "rotary_value": None, "max_position_embeddings": 1536},
    unused=("roformer.pooler.",),
    constants=_constants,
    pooler={},
    decoder="ForCausalLM",
    pairing="adjacent",
)
