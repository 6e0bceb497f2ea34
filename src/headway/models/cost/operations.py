"""Operations, counted from the spec.

A multiply-add is 2 operations, and only matrix products are counted: norms, activations, softmax and rotations are of a
lower order. What a pattern allows is counted pair by pair, not asserted.

Legend: M width, H query heads, D per head, V vocab, n tokens of a row, W `matrix_weights`.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from headway.models.cost.weights import matrix_weights
from headway.models.spec import ModelSpec
from headway.patterns import Pattern, pairs, visible
from headway.tokens import Tokens


def attention_pairs(spec: ModelSpec, n: int) -> int:
    """(query, key) pairs that all heads of all layers score in a row of n tokens, counted."""
    return sum(_pairs(p, n, spec.heads) for p in spec.patterns)


def prefill_flops(spec: ModelSpec, n: int, logits: int = 1) -> float:
    """Operations of a forward pass over a row of n tokens.

        2 n W  +  4 D (pairs of all heads and layers)  +  2 M V logits

    with W = `matrix_weights`; the pairs cost 2 D for the score and 2 D for the value.

    Args:
        n: tokens.
        logits: slots whose logits are computed: 1 before decoding, n in training.
    """
    products = 2.0 * n * matrix_weights(spec)
    return products + 4.0 * spec.head_dim * attention_pairs(spec, n) + 2.0 * spec.width * spec.vocab * logits


def train_flops(spec: ModelSpec, context: int) -> float:
    """Operations per trained token in rows of `context` tokens: 3 prefill_flops(context, context) / context.

    The backward of a product is two products. What is computed a second time (checkpointed blocks, scores
    that are not stored) is not counted: this is the model's work, whoever does it.
    """
    return 3.0 * prefill_flops(spec, context, logits=context) / context


def decode_flops(spec: ModelSpec, context: int) -> float:
    """Operations for one more token of a row that then has `context` tokens.

    2 (W + M V)  +  4 D (keys that the last query sees, over all heads and layers)
    """
    seen = sum(sum(_seen_by_last(p, context, spec.heads)) for p in spec.patterns)
    return 2.0 * (matrix_weights(spec) + spec.width * spec.vocab) + 4.0 * spec.head_dim * seen


@lru_cache(maxsize=512)
def _pairs(pattern: Pattern, n: int, heads: int) -> int:
    return pairs(pattern, n, heads=heads, tile=64 if n <= 32768 else 512)


@lru_cache(maxsize=512)
def _seen_by_last(pattern: Pattern, n: int, heads: int) -> tuple[int, ...]:
    """Keys that the last of n tokens sees, per query head."""
    seen = last_row(pattern, n).sum(-1).tolist()
    return tuple(seen) if len(seen) == heads else tuple(seen * heads)


def last_row(pattern: Pattern, n: int) -> torch.Tensor:
    """bool [H|1, n]: what the last of n tokens sees."""
    return visible(pattern, Tokens.range(1, start=n - 1), Tokens.range(n))[0, :, 0]
