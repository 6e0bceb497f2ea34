"""Tensors and tokens of an attention case, made once and shared by every side.

Legend: B rows, H query heads, K kv heads, N tokens, D per head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.patterns import pairs
from headway.tokens import Tokens
from headway_lab.bench.cases import TRAIN, Case

PACKED = (1 / 4, 1 / 8, 3 / 8, 1 / 16, 3 / 16)
"""Shares of a packed row that its documents take."""

RAGGED = (1.0, 0.7, 0.4, 0.3)
"""Shares of the longest row that the rows of a ragged batch have."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """q [B, H, N, D], k and v [B, K, N, D], the gradient of the output, and what the tokens are."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    tokens: Tokens
    backward: bool

    @property
    def grouped(self) -> bool:
        return self.case.heads != self.case.kv_heads

    @property
    def plain(self) -> bool:
        """Every row is one document, without padding or global tokens."""
        return self.case.layout == "plain"

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    def run(self, call: Callable[[], Tensor]) -> Callable[[], Sequence[Tensor]]:
        """`call` as it is measured: forward alone without gradients, or forward and backward, with the
        output and the gradients of q, k and v as result."""
        leaves = (self.q, self.k, self.v)

        def forward() -> Sequence[Tensor]:
            with torch.no_grad():
                return (call(),)

        def both() -> Sequence[Tensor]:
            for leaf in leaves:
                leaf.grad = None
            out = call()
            out.backward(self.grad)
            grads = [leaf.grad for leaf in leaves]
            return (out.detach(), *(g for g in grads if g is not None))

        return both if self.backward else forward

    @property
    def flops(self) -> float:
        """Useful work of one call."""
        return flops(self.case, self.backward, self.tokens)


def flops(case: Case, backward: bool, tokens: Tokens) -> float:
    """Useful work: 4 D per allowed pair and query head forward (two products), 2.5 times that backward (five)."""
    count = pairs(case.pattern, case.tokens, heads=case.heads, tokens=tokens)
    rows = case.batch if tokens.rows == 1 else 1
    return 4.0 * case.width * count * rows * (3.5 if backward else 1.0)


def tokens_of(case: Case) -> Tokens:
    """What the tokens of a case are."""
    n = case.tokens
    if case.layout == "global":
        return Tokens.range(n).with_global(list(range(case.globals)))
    if case.layout == "packed":
        return Tokens.packed([max(1, int(n * share)) for share in PACKED], n)
    if case.layout == "ragged":
        return Tokens.from_lengths([max(1, int(n * share)) for share in RAGGED], n)
    assert case.layout == "plain", case.layout
    return Tokens.range(n)


def make(case: Case, dtype: str, direction: str) -> Inputs:
    """The inputs of one row of the bench; the same numbers every time."""
    kind, noise = getattr(torch, dtype), torch.Generator().manual_seed(0)
    backward = direction == TRAIN

    def random(heads: int) -> Tensor:
        return torch.empty(case.batch, heads, case.tokens, case.width, dtype=kind).normal_(generator=noise)

    q, k, v = (random(heads).requires_grad_(backward) for heads in (case.heads, case.kv_heads, case.kv_heads))
    return Inputs(case, q, k, v, random(case.heads), tokens_of(case), backward)
