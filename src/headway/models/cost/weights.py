"""Numbers in the weights and their bytes, counted from the spec.

Legend: M width, E columns of the embedding, L layers, H query heads, K kv heads, D per head, F width of the
feed-forward, V vocab.
"""

from __future__ import annotations

import torch

from headway.errors import ConfigError
from headway.models.spec import ModelSpec


def parameters(spec: ModelSpec) -> dict[str, int]:
    """Numbers in the weights, by where they are; their sum is `parameter_count`.

        embedding      V E  (and the tables of `Learned` and of token types, and E M + M where E is not M)
        attention      L (M D (H + K + K) + H D M)      plus biases; q, k and v twice with
                       `global_projections`; all of it twice in the decoder of an encoder-decoder
        feed-forward   L 3 M F, or 2 M F not gated      plus biases, where F > 0
        norms          (2 L + 1) M                      plus 2 L D with qk_norm; L M fewer in order "joint" and where
                       F = 0, L M more beside an encoder; M fewer without final_norm, E more with embedding_norm; twice
                       with norm_bias
        positions      trained angles and tables of scores
        output layer   V E, or 0 when tied              plus biases, and what else the head has
        encoder        all of the encoder's, without a shared embedding

    E is M unless `embedding_width` says otherwise. Patterns have none.
    """
    m, h, k, d, f, e = spec.width, spec.heads, spec.kv_heads, spec.head_dim, spec.hidden, spec.columns
    qkv = (m + spec.qkv_bias) * d * (h + 2 * k)
    attention = qkv * (1 + spec.global_projections) + h * d * m + m * spec.out_bias
    cross = spec.encoder is not None
    forward = (2 + spec.gated) * m * f + ((1 + spec.gated) * f + m) * (spec.mlp_bias and f > 0)
    per_norm = 1 + spec.norm_bias
    norms = m * (spec.layers * (1 + (spec.order != "joint" and f > 0) + cross) + spec.final_norm)
    norms += e * spec.embedding_norm
    found = {
        "embedding": (spec.vocab + spec.positions.rows + spec.token_types) * e + (e * m + m) * (e != m),
        "attention": spec.layers * (attention + cross * (qkv + h * d * m + m * spec.out_bias)),
        "feed-forward": spec.layers * forward,
        "norms": norms * per_norm + 2 * spec.layers * d * spec.qk_norm * (1 + cross),
        "positions": _position_parameters(spec),
        "output layer": _head_parameters(spec),
    }
    if spec.encoder is not None:
        shared = spec.encoder.vocab * spec.encoder.columns if spec.shared_embedding else 0
        found["encoder"] = parameter_count(spec.encoder) - shared
    return {name: n for name, n in found.items() if n or name not in ("positions", "encoder")}


def block_parameters(spec: ModelSpec) -> int:
    """Numbers in a block of `spec`, without positions and its norms' share of what lies outside."""
    found = parameters(spec)
    outside = spec.width * spec.final_norm + spec.columns * spec.embedding_norm
    return (
        found["attention"] + found["feed-forward"] + found["norms"] - outside * (1 + spec.norm_bias)
    ) // spec.layers


def _head_parameters(spec: ModelSpec) -> int:
    head, m, e = spec.head, spec.width, spec.columns
    if head.task == "lm":
        return spec.vocab * (m * (not spec.tied) + spec.output_bias)
    if head.task == "masked-lm":
        inner = e if head.dense is not None else m
        dense = (m * e + e + e * (1 + spec.norm_bias)) if head.dense is not None else 0
        return dense + spec.vocab * (inner * (not spec.tied) + spec.output_bias)
    return (m * m + m) * (head.dense is not None) + (m + 1) * head.outputs


def _position_parameters(spec: ModelSpec) -> int:
    total = 0
    for i, scheme in enumerate(spec.layer_positions):
        if scheme.marks == "queries and keys":
            total += scheme.trained_numbers(spec.head_dim)
        elif scheme.marks == "scores" and (i == 0 or not scheme.shared):
            with torch.device("meta"):
                steps = scheme.scores(spec.heads, spec.head_dim, not spec.causal)
            total += sum(t.numel() for s in steps for t in s.parameters if isinstance(t, torch.nn.Parameter))
    return total


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
