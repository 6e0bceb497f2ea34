"""Tensors and tokens of an attention case, made once and shared by every side; and the `Problem` that a row times.

Legend: B batch, H query heads, K KV heads, N tokens, D per head.
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
"""Lengths of the documents in a packed row, as shares of the row."""

RAGGED = (1.0, 0.7, 0.4, 0.3)
"""Lengths of the sequences in a ragged batch, as shares of the longest."""

Call = Callable[[], Tensor]
Side = Callable[[], Sequence[Tensor]]
T = TypeVar("T")


class UnsupportedCase(Exception):
    """A peer cannot run this case; the message says why."""


@dataclass
class Problem:
    """The sides that one row of the bench times.

    sides       name -> call, headway's under OURS; a call returns outputs (and gradients)
    work        useful FLOPs of a call, or bytes if memory bounds it
    bound       key of the limit that it is compared with (`measure.LIMITS`)
    scale       sides of headway's that solve another problem and whose outputs are not compared, with the factor that
                makes their time comparable
    tolerance   largest difference of outputs, if it is not that of rounding (`measure.TOLERANCE`)
    tokens      tokens that a call generates or reads, if tokens per second are reported
    peak        returns the peak memory of a side in bytes, if it is measured
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
        """Adds the peers that can be made on this machine, and a note with the reason for each other one."""
        for name, make in makers.items():
            try:
                self.sides[name] = make()
            except UnsupportedCase as reason:
                self.notes.append(f"{name}: {reason}")

    def set_beside(self, name: str, side: Side, scale: float = 1.0) -> None:
        """Adds another problem of headway's for comparison of times; `scale` makes them times for the same work."""
        self.sides[name], self.scale[name] = side, scale


@dataclass(frozen=True, eq=False)
class Inputs:
    """q [B, H, N, D], k and v [B, K, N, D], the gradient of the output, and the tokens, shared by queries and keys."""

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
        """Returns `call` as it is measured: forward only and without gradients, or forward and backward, returning the
        output and the gradients of q, k and v."""

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
    """Returns `call` under `no_grad`, with its output as the only result."""

    def side() -> Sequence[Tensor]:
        with torch.no_grad():
            return (call(),)

    return side


def fastest(calls: Sequence[T], run: Callable[[T], Callable[[], object]]) -> T:
    """Returns the call whose `run(call)` is fastest, of two tries each after a warm-up."""

    def seconds(call: T) -> float:
        timed_call = run(call)
        timed_call()
        return profiling.fastest(timed_call, 2)

    return min(calls, key=seconds)


def tokens_of(case: Case) -> Tokens:
    """Returns the tokens of a case's layout."""
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
    """Returns the inputs of one row of the bench, with the same numbers every time."""
    torch_dtype, noise = getattr(torch, dtype), torch.Generator().manual_seed(0)
    backward = direction == TRAIN

    def random(heads: int) -> Tensor:
        return torch.empty(case.batch, heads, case.tokens, case.width, dtype=torch_dtype).normal_(
            generator=noise
        )

    q, k, v = (random(heads).requires_grad_(backward) for heads in (case.heads, case.kv_heads, case.kv_heads))
    return Inputs(case, q, k, v, random(case.heads), tokens_of(case), backward)
