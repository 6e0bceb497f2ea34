"""Patterns and scores in the form that FlexAttention takes: functions of one pair, given its place.

Legend: b, h, m, n a row, a query head, a query and a key in block order, each a scalar tensor; H query heads, T
queries, D per head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from headway.attention.call import Call
from headway.patterns import Extent, Pattern, judge
from headway.patterns.program import fold
from headway.scores import ALiBi, RelativeBias, RelativeKey, Score, SoftCap, check_heads
from headway.tokens import Tokens

Read = Callable[[Tensor, Tensor], Tensor]
"""(b, slot) -> one field of the slot's token: its index, position, document or global mark."""

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(b, h, m, n) -> whether the query may see the key."""

Mod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, b, h, m, n) -> the changed score."""


@dataclass(frozen=True, eq=False)
class Slots:
    """The tokens of one side, read slot by slot. `document` is None if each row is one document, `is_global` if no
    token is global."""

    index: Read
    position: Read
    document: Read | None
    is_global: Read | None

    @staticmethod
    def of(tokens: Tokens) -> "Slots":
        index = _slot if tokens.start == 0 else _read(tokens.index)
        return Slots(
            index,
            index if tokens.position is None else _read(tokens.position),
            None if tokens.document is None else _read(tokens.document),
            None if tokens.is_global is None else _read(tokens.is_global),
        )

    def tile(self, b: Tensor, slot: Tensor, step: int) -> Extent:
        """Returns the extent of a single slot, with residues modulo `step`."""
        index = self.index(b, slot)
        document: Any = 0 if self.document is None else self.document(b, slot)
        is_global: Any = False if self.is_global is None else self.is_global(b, slot)
        valid, residue = index >= 0, index % step
        marks = (document, document, is_global, is_global, valid, valid)
        return Extent(index, index, *marks, residue, residue, step)

    @staticmethod
    def form(tokens: Tokens) -> tuple[object, ...]:
        """Returns the traits of a side that a compiled kernel depends on: sides of equal form share a kernel."""
        fields = (tokens.document, tokens.is_global, tokens.position)
        return tokens.start is None, tokens.start == 0, tokens.rows > 1, *(f is None for f in fields)


def _slot(b: Tensor, slot: Tensor) -> Tensor:
    return slot


def _read(values: Tensor) -> Read:
    """Returns a function (b, slot) that looks up values [B|1, N], integers or bools."""
    table = (values if values.dtype == torch.bool else values.to(torch.int32)).contiguous()
    if table.shape[0] > 1:
        return lambda b, slot: table[b, slot]
    row = table[0]
    return lambda b, slot: row[slot]


# -- patterns ------------------------------------------------------------------------------------------------


def mask_mod(pattern: Pattern, q: Slots, k: Slots) -> Mask:
    """Returns the predicate of `visible` for one pair. The pair is judged as two tiles of one slot each, separately
    for each leaf, since dilations differ."""

    def seen(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        def certain(leaf: Pattern) -> Tensor:
            return judge(leaf, q.tile(b, m, leaf.dilation), k.tile(b, n, leaf.dilation))[1]

        return fold(
            pattern,
            certain,
            lambda parts: reduce(torch.logical_and, parts),
            lambda parts: reduce(torch.logical_or, parts),
        )

    return seen


# -- scores --------------------------------------------------------------------------------------------------


SCORES = (SoftCap, ALiBi, RelativeBias, RelativeKey)
"""Score steps that depend only on the score and the place of its pair, given tables computed beforehand."""


def score_mod(call: Call, q: Tensor, at_q: Slots, at_k: Slots) -> Mod:
    """Returns one function that applies the steps of `call.score` in order; q [B, H, T, D] is in block order. Tables
    get gradients."""
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
