"""Bytes that training holds, counted from the spec.

Legend: M width, L layers, H query heads, K kv heads, D per head, F width of the feed-forward, V vocab, n tokens of a
row.
"""

from __future__ import annotations

from typing import Literal

import torch

from headway.errors import ConfigError
from headway.models.cost.weights import weight_bytes
from headway.models.spec import ModelSpec

Scores = Literal["recomputed", "stored"]


def activation_bytes(
    spec: ModelSpec,
    context: int,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    *,
    scores: Scores = "recomputed",
    gradient_checkpointing: bool = False,
) -> dict[str, int]:
    """What a forward pass keeps for the backward, in bytes, by cause.

    Per token, with e bytes per number (4 in float32, 2 in bfloat16):

        norms          (2 L + 1) ((4 + 2 e) M + 4)           what is normed, in float32; the result; with gain
                       + L (H + K) ((4 + e) D + 4) with qk_norm
          "layer"      (2 L + 1) (2 e M + 2 e)               input and result; mean and deviation
        attention      L (e D (2 H + 2 K) + 4 H)             q, k, v, the output, and the logsumexp
        feed-forward   L 4 e F                               gate, its activation, up, their product
          not gated    L 2 e F                               up and its activation; e F fewer with ReLU, either way
        dropout        (2 L + 1) e M                         what the embedding and the sub-layers kept;
                                                             e M more with final_dropout
        logits         4 V                                   the log-probabilities, in float32

    (in order "joint" L norms fewer; in order "parallel" two norms of a layer keep one input; a norm behind the
    embedding keeps its input, e M + 2 e),

    and, per row of n tokens, only where `scores` are "stored" (backend "dense"):

        scores         L (8 H n^2)  + L n^2                  exp(scores) and weights, in float32; one mask
                       and q, k, v in float32 whatever e is

    With `gradient_checkpointing`, one block at a time is computed again: of L layers one counts, and the others
    keep their input, L e M per token ("inputs"). Parameters, gradients and optimizer come on top
    (`training_bytes`). The backend "banded" keeps one more copy of the output, e H D.
    """
    _must_be_counted(spec, "activation_bytes")
    m, h, k, d, f = spec.width, spec.heads, spec.kv_heads, spec.head_dim, spec.hidden
    e, n, tokens = dtype.itemsize, context, context * batch
    full = 1 if gradient_checkpointing else spec.layers
    norms = full * (1 if spec.order == "joint" else 2) + 1
    inputs = norms - full * (spec.order == "parallel") + spec.embedding_norm
    rms = norms * ((4 + 2 * e) * m + 4)
    layer = inputs * e * m + norms * e * m + (norms + spec.embedding_norm) * 2 * e
    qk = (h + k) * ((4 + e) * d + 4) * spec.qk_norm
    hidden = (4 if spec.gated else 2) - (spec.activation == "relu")
    found = {
        "norms": tokens * ((rms if spec.norm == "rms" else layer) + full * qk),
        "attention": tokens * full * ((4 if scores == "stored" else e) * d * (h + 2 * k) + e * d * h + 4 * h),
        "scores": full * (8 * h * n * n * batch + n * n) if scores == "stored" else 0,
        "feed-forward": tokens * full * hidden * e * f,
        "logits": tokens * 4 * spec.vocab,
    }
    if spec.dropout:
        found["dropout"] = tokens * (2 * full + 1 + spec.final_dropout) * e * m
    return {**found, "inputs": tokens * spec.layers * e * m} if gradient_checkpointing else found


def _must_be_counted(spec: ModelSpec, what: str) -> None:
    usual = {"final_norm": True, "causal": True, "embedding_width": None, "encoder": None,
             "linear": None, "token_types": 0, "activation_dropout": 0.0}  # fmt: skip
    other = [
        f"{name}={getattr(spec, name)!r}" for name, value in usual.items() if getattr(spec, name) != value
    ]
    if spec.order == "post" or (spec.norm == "rms" and (spec.order == "parallel" or spec.embedding_norm)):
        other[:0] = [f"{name}={getattr(spec, name)!r}" for name in ("order", "norm", "embedding_norm")]
    if other:
        raise ConfigError(
            f"{what} is counted for decoders whose norms stand in front of their sub-layers; this model has "
            f"{', '.join(other)}"
        )


def training_bytes(
    spec: ModelSpec,
    context: int,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    *,
    scores: Scores = "recomputed",
    gradient_checkpointing: bool = False,
) -> dict[str, int]:
    """Bytes that training holds at the end of a forward pass, by cause: parameters, gradients and AdamW's
    two moments (all in `dtype`), and `activation_bytes`."""
    own = weight_bytes(spec, dtype)
    held = {"parameters": own, "gradients": own, "optimizer": 2 * own}
    kept = activation_bytes(
        spec, context, batch, dtype, scores=scores, gradient_checkpointing=gradient_checkpointing
    )
    return held | kept
