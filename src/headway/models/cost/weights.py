"""Numbers in the weights and their bytes, counted on modules without memory.

Legend: M width, E columns of the embedding, L layers, H query heads, K kv heads, D per head, F width of the
feed-forward, V vocab.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch

from headway.errors import ConfigError
from headway.models.build import blank
from headway.models.spec import ModelSpec
from headway.positions import PerLayer

PLACES: Mapping[str, str] = {
    "encoder": r"^encoder\.",
    "output layer": r"^(lm_)?head\b",
    "positions": r"\bfrequency_offset\b|\bscores?\b",
    "norms": "norm",
    "embedding": r"\bembed_",
    "feed-forward": r"\bmlp\b",
    "attention": "attn",
}
"""Where parameters are, by their names: the first that is found there."""


def place_of(name: str) -> str:
    """Where `parameters` counts the parameter, or the layer, of that name."""
    return next(place for place, pattern in PLACES.items() if re.search(pattern, name))


@lru_cache(maxsize=128)
def parameter_sizes(spec: ModelSpec) -> Mapping[str, int]:
    """Numbers in each parameter of a stack, its head and its embedding, by name. Layers are alike but for their
    positions: those of all of them together stand under the name of the first."""
    found = Counter[str]()
    schemes = Counter(spec.layer_positions)
    for number, (scheme, layers) in enumerate(schemes.items()):
        positions = spec.positions if len(schemes) == 1 else PerLayer((scheme,))
        with torch.device("meta"):
            model = blank(replace(spec, layers=1, patterns=spec.patterns[:1], positions=positions))
        for name, parameter in model.named_parameters():
            if place_of(name) != "encoder":
                found[name] += parameter.numel() * (layers if ".layers." in name else number == 0)
    return found


def parameters(spec: ModelSpec) -> dict[str, int]:
    """Numbers in the weights, by where they are; their sum is `parameter_count`.

        embedding      V E, tables of `Learned` and of token types, and what projects E columns to M
        attention      L (M D (H + K + K) + H D M), biases, cross-attention, projections of global tokens
        feed-forward   L 3 M F, or 2 M F not gated, and biases
        norms          M for each, E behind an embedding, D on queries and on keys; twice with norm_bias
        positions      trained angles and tables of scores
        output layer   V E, or 0 when tied, biases, and what else the head has
        encoder        all of the encoder's, without a shared embedding

    Patterns have none.
    """
    found = dict.fromkeys(("embedding", "attention", "feed-forward", "norms", "positions", "output layer"), 0)
    for name, size in parameter_sizes(spec).items():
        found[place_of(name)] += size
    if spec.encoder is not None:
        shared = spec.encoder.vocab * spec.encoder.columns if spec.shared_embedding else 0
        found["encoder"] = parameter_count(spec.encoder) - shared
    return {name: n for name, n in found.items() if n or name != "positions"}


def block_parameters(spec: ModelSpec) -> int:
    """Numbers in a block of `spec`, without positions."""
    sizes = parameter_sizes(spec).items()
    inside = [n for name, n in sizes if ".layers." in name and place_of(name) != "positions"]
    return sum(inside) // spec.layers


def numbers_in_blocks(spec: ModelSpec) -> int:
    """Numbers in all blocks, an encoder's too, without positions."""
    stacks = [spec] if spec.encoder is None else [spec, spec.encoder]
    return sum(stack.layers * block_parameters(stack) for stack in stacks)


def parameter_count(spec: ModelSpec) -> int:
    """All trained numbers; a tied output layer counts once."""
    return sum(parameters(spec).values())


def matrix_weights(spec: ModelSpec) -> int:
    """Weights that every token is multiplied with in a stack: L (M D (2 H + 2 K) + 3 M F), 2 M F not gated; E M more
    where E is not M; beside an encoder 2 L M D H more, of the queries and outputs of cross-attention. (Its keys and
    values are of source tokens: `memory_weights`. A second set of projections is for tokens that data mark.)"""
    m, h, k, d = spec.width, spec.heads, spec.kv_heads, spec.head_dim
    attention = m * d * (2 * h + 2 * k) + 2 * m * d * h * (spec.encoder is not None)
    projected = spec.columns * m * (spec.columns != m)
    return spec.layers * (attention + (2 + spec.gated) * m * spec.hidden) + projected


def memory_weights(spec: ModelSpec) -> int:
    """Weights that every last state of an encoder is multiplied with in the decoder: 2 L M D K; 0 without one."""
    return 2 * spec.layers * spec.width * spec.head_dim * spec.kv_heads * (spec.encoder is not None)


def weight_bytes(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of all parameters."""
    return parameter_count(spec) * dtype.itemsize


def weight_bytes_read(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> int:
    """Bytes of weights that a step of one token per row reads: everything of a decoder once, but of an embedding that
    is not also the output layer only `batch` rows; nothing of an encoder, nor what makes keys of its states.

    Raises ConfigError for an encoder, which takes no such steps."""
    must_decode(spec, "weight_bytes_read")
    found = parameters(spec)
    rows = (0 if spec.tied else batch) + (batch if spec.positions.rows else 0)
    embedding = found["embedding"] - (spec.vocab * spec.width if spec.tied else 0)
    of_memory = memory_weights(spec) // spec.width * (spec.width + spec.qkv_bias)
    read = sum(found.values()) - found.get("encoder", 0) - of_memory - embedding + rows * spec.width
    return read * dtype.itemsize


def must_decode(spec: ModelSpec, what: str) -> None:
    """Raises ConfigError for an encoder."""
    if spec.kind == "encoder":
        raise ConfigError(
            f"{what} is of decoding, token by token, and an encoder reads whole rows at once; "
            "ask for prefill_flops, activation_bytes or training_bytes"
        )
