"""Patterns and scores as FlexAttention takes them: functions of one pair, given by its place.

Legend: b, h, m, n a row, a query head, a query and a key in block order, each a scalar tensor; H query heads, T
queries, D per head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from headway.attention.call import Call
from headway.patterns import Pattern
from headway.patterns.primitives import Kind, Primitive
from headway.patterns.program import fold, primitive
from headway.scores import ALiBi, RelativeBias, RelativeKey, Score, SoftCap, check_heads
from headway.tokens import Tokens

Read = Callable[[Tensor, Tensor], Tensor]
"""(b, slot) -> what is known of the slot."""

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(b, h, m, n) -> may the query see the key?"""

Mod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, b, h, m, n) -> score."""


@dataclass(frozen=True, eq=False)
class Slots:
    """One side's tokens, to be read slot by slot; None is what every slot is (a token, of one document, local)."""

    index: Read
    position: Read
    valid: Read | None
    document: Read | None
    is_global: Read | None

    @staticmethod
    def of(tokens: Tokens) -> Slots:
        plain = tokens.start == 0
        index = _slot if plain else _read(tokens.index)
        regular = tokens.start is not None
        return Slots(
            index,
            index if tokens.position is None else _read(tokens.position),
            None if regular else _positive(index),
            None if tokens.document is None else _read(tokens.document),
            None if tokens.is_global is None else _read(tokens.is_global),
        )

    @staticmethod
    def form(tokens: Tokens) -> tuple[object, ...]:
        """What two sides share when one kernel serves both."""
        fields = (tokens.document, tokens.is_global, tokens.position)
        return tokens.start is None, tokens.start == 0, tokens.rows > 1, *(f is None for f in fields)


def _slot(b: Tensor, slot: Tensor) -> Tensor:
    return slot


def _positive(index: Read) -> Read:
    return lambda b, slot: index(b, slot) >= 0


def _read(values: Tensor) -> Read:
    """values [B|1, N], integers or bools, as a function of the place."""
    table = (values if values.dtype == torch.bool else values.to(torch.int32)).contiguous()
    if table.shape[0] > 1:
        return lambda b, slot: table[b, slot]
    row = table[0]
    return lambda b, slot: row[slot]


# -- patterns ------------------------------------------------------------------------------------------------


def mask_mod(pattern: Pattern, q: Slots, k: Slots) -> Mask:
    """`visible` of one pair: the pattern, and the laws of tokens (documents, empty slots)."""
    laws = [fold(pattern, lambda leaf: _allowed(primitive(leaf), q, k), _all, _any)]
    laws += [] if q.valid is None else [_of_query(q.valid)]
    laws += [] if k.valid is None else [_of_key(k.valid)]
    if q.document is not None or k.document is not None:
        document_q, document_k = q.document or _first, k.document or _first
        laws.append(lambda b, m, n: document_q(b, m) == document_k(b, n))
    every = _all(laws)
    return lambda b, h, m, n: every(b, m, n)


Pair = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(b, m, n) -> bool."""


def _first(b: Tensor, slot: Tensor) -> Tensor:
    """The document of a slot where there is one document only."""
    return slot * 0


def _all(tests: Sequence[Pair]) -> Pair:
    return lambda b, m, n: reduce(torch.logical_and, [test(b, m, n) for test in tests])


def _any(tests: Sequence[Pair]) -> Pair:
    return lambda b, m, n: reduce(torch.logical_or, [test(b, m, n) for test in tests])


def _allowed(p: Primitive, q: Slots, k: Slots) -> Pair:
    """A primitive on one pair."""
    index_q, index_k = q.index, k.index
    if p.kind == Kind.CAUSAL:
        return lambda b, m, n: index_k(b, n) <= index_q(b, m)
    if p.kind == Kind.WINDOW:
        return _window(p, index_q, index_k)
    if p.kind == Kind.SINK:
        return lambda b, m, n: index_k(b, n) < p.last
    if p.kind == Kind.GLOBAL_KEYS and k.is_global is not None:
        return _of_key(k.is_global)
    if p.kind == Kind.GLOBAL_QUERIES and q.is_global is not None:
        return _of_query(q.is_global)
    return (lambda b, m, n: n >= 0) if p.kind == Kind.FULL else (lambda b, m, n: n < 0)


def _window(p: Primitive, index_q: Read, index_k: Read) -> Pair:
    def near(b: Tensor, m: Tensor, n: Tensor) -> Tensor:
        away = index_k(b, n) - index_q(b, m)
        inside = (away >= p.first) & (away <= p.last)
        return inside if p.step == 1 else inside & (away % p.step == 0)

    return near


def _of_query(marks: Read) -> Pair:
    return lambda b, m, n: marks(b, m)


def _of_key(marks: Read) -> Pair:
    return lambda b, m, n: marks(b, n)


# -- scores --------------------------------------------------------------------------------------------------


SCORES = (SoftCap, ALiBi, RelativeBias, RelativeKey)
"""Steps that are functions of the score and the place of its pair, with tables made before."""


def score_mod(call: Call, q: Tensor, at_q: Slots, at_k: Slots) -> Mod:
    """The steps of `call.score`, in order; q [B, H, T, D] in block order. Tables get their gradients."""
    steps = [_step(step, call, q, at_q, at_k) for step in call.score]

    def mod(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        for step in steps:
            score = step(score, b, h, m, n)
        return score

    return mod


def _step(step: Score, call: Call, q: Tensor, at_q: Slots, at_k: Slots) -> Mod:
    position_q, position_k, dtype = at_q.position, at_k.position, call.work_dtype
    check_heads(step, q.shape[1])

    def away(b: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return position_k(b, n) - position_q(b, m)

    match step:
        case SoftCap(cap):
            return lambda score, b, h, m, n: torch.tanh(score / cap) * cap
        case ALiBi():
            slopes = torch.tensor(step.of_heads(q.shape[1]), dtype=dtype, device=q.device)
            return lambda score, b, h, m, n: score - slopes[h] * away(b, m, n).abs()
        case RelativeBias():
            far, bias = step.max_distance, step.table.to(dtype)[step.buckets()]
            return lambda score, b, h, m, n: score + bias[away(b, m, n).clamp(-far, far) + far, h]
        case RelativeKey():
            clip = step.clip(q.shape[3])
            products = (q.to(dtype) @ step.table.to(dtype).T) * call.scale
            return lambda score, b, h, m, n: (
                score + products[b, h, m, away(b, m, n).clamp(-clip, clip) + clip]
            )
    raise AssertionError(f"{step} is not among SCORES")
