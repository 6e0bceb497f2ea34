"""Tensors and tokens of an attention case, made once and shared by every side; and the problem that a row times.

Legend: B rows, H query heads, K kv heads, N tokens, D per head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from headway.patterns import pairs
from headway.tokens import Tokens
from headway_lab import profiling
from headway_lab.bench.cases import TRAIN, Case

OURS = "headway"
PACKED = (1 / 4, 1 / 8, 3 / 8, 1 / 16, 3 / 16)
"""Shares of a packed row that its documents take."""

RAGGED = (1.0, 0.7, 0.4, 0.3)
"""Lengths of the rows of a ragged batch, as shares of the longest."""

Call = Callable[[], Tensor]
Side = Callable[[], Sequence[Tensor]]
T = TypeVar("T")


class UnsupportedCase(Exception):
    """A peer cannot run this case; the message says why."""


@dataclass
class Problem:
    """The sides that one row of the bench times.

    sides       name -> call, headway's under OURS; a call returns outputs (and gradients)
    work        useful FLOPs of a call, or bytes where memory bounds it
    bound       the limit that it is measured against (`measure.LIMITS`)
    scale       headway's sides that solve another problem, whose outputs are not compared, with the factor that makes
                their time comparable
    tolerance   how far outputs may be apart, where rounding alone does not say it (`measure.TOLERANCE`)
    tokens      those that a call makes or reads, where they are what is counted
    peak        bytes that a side holds at its peak, where that is asked for
    notes       peers left out, and why
    """

    sides: dict[str, Side]
    work: float
    bound: str = "products"
    scale: dict[str, float] = field(default_factory=dict)
    tolerance: float | None = None
    tokens: int | None = None
    peak: Callable[[str], int] | None = None
    notes: list[str] = field(default_factory=list)

    def add_peers(self, makers: Mapping[str, Callable[[], Side]]) -> None:
        """Adds the peers that can be made here; for the others a note says why not."""
        for name, make in makers.items():
            try:
                self.sides[name] = make()
            except UnsupportedCase as why:
                self.notes.append(f"{name}: {why}")

    def set_beside(self, name: str, side: Side, scale: float = 1.0) -> None:
        """Adds another problem of headway's, in time or, with `scale`, in time for as much work."""
        self.sides[name], self.scale[name] = side, scale


@dataclass(frozen=True, eq=False)
class Inputs:
    """q [B, H, N, D], k and v [B, K, N, D], the gradient of the output, and the tokens of both sides."""

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
        """Whether every row is one document, without padding or global tokens."""
        return self.case.layout == "plain"

    def run(self, call: Call) -> Side:
        """`call` as it is measured: forward alone without gradients, or forward and backward, with the
        output and the gradients of q, k and v as result."""

        def both() -> Sequence[Tensor]:
            out = call()
            return (out.detach(), *torch.autograd.grad(out, (self.q, self.k, self.v), self.grad))

        return both if self.backward else without_gradient(call)

    @property
    def flops(self) -> float:
        """Useful work: 4 D per allowed pair and query head forward (two products), 2.5 times that backward (five)."""
        case = self.case
        count = pairs(case.pattern, case.tokens, heads=case.heads, tokens=self.tokens)
        rows = case.batch if self.tokens.rows == 1 else 1
        return 4.0 * case.width * count * rows * (3.5 if self.backward else 1.0)


def without_gradient(call: Call) -> Side:
    """`call` under `no_grad`, its output as the only result."""

    def side() -> Sequence[Tensor]:
        with torch.no_grad():
            return (call(),)

    return side


def fastest(calls: Sequence[T], run: Callable[[T], Callable[[], object]]) -> T:
    """The call whose `run(call)` is fastest, of two tries each after a warm-up."""

    def seconds(call: T) -> float:
        whole = run(call)
        whole()
        return profiling.fastest(whole, 2)

    return min(calls, key=seconds)


def tokens_of(case: Case) -> Tokens:
    """The tokens of a case's layout."""
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
