"""Writes attention, forward and backward, as cases for driver.cpp, with float64 results. No kernel of this machine is
needed: the backward reads what the formula gives for the forward.

    python -m tests.native.arm.attention FILE"""

import sys
from bisect import bisect_right
from ctypes import c_char
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.native import interface, loader
from tests.native.arm.calls import Call, taken
from tests.native.arm.files import CaseFile
from tests.native.arm.record import allowance
from tests.native.calls import PATTERNS, problem
from tests.native.plain import NAMES, Problem, Reference, results

KINDS = ("range", "chunk", "packed", "left", "range", "ring", "global")
LENGTHS = (17, 63, 131, 200)
DIMS = ((64, 64), (33, 33), (128, 128), (80, 40), (16, 16), (7, 9))
HEADS = ((3, 3), (6, 2), (5, 1))
STEPS = ("none", "none", "cap", "none", "alibi")
OF_PAIRS = "avx512bf16"
"""The level whose bounds are those of i8mm, but for the logsumexp: its exponentials are not rounded."""
DROPOUTS = (0.0, 0.0, 0.0, 0.3)


@dataclass
class Given:
    """A library that has the formula's results and takes calls."""

    out: Tensor
    lse: Tensor
    calls: list[tuple[Call, interface.CallStruct]] = field(default_factory=list)

    def headway_forward(self, call: Any) -> int:
        self._take("headway_forward", call)
        made = self.calls[-1][0]
        struct = call._obj
        half = self.out.dtype == torch.bfloat16
        out = self.out.contiguous().view(torch.int16 if half else torch.float32).numpy()
        _write(made, struct.out.data, places(struct.out, self.out), out)
        _write(made, struct.lse, np.arange(self.lse.numel()), self.lse.numpy())
        return 0

    def headway_backward(self, call: Any) -> int:
        self._take("headway_backward", call)
        return 0

    def _take(self, function: str, call: Any) -> None:
        copied = interface.CallStruct.from_buffer_copy(call._obj)
        self.calls.append((taken(function, (call,)), copied))


def places(where: interface.TensorStruct, like: Tensor) -> np.ndarray:
    """Elements from where a tensor begins to each of its own."""
    b, h, n, d = (torch.arange(size) for size in like.shape)
    first = (b * where.batch).view(-1, 1, 1, 1) + (h * where.head).view(-1, 1, 1)
    offsets: np.ndarray = (first + (n * where.slot).view(-1, 1) + d).flatten().numpy()
    return offsets


def piece(call: Call, address: int) -> int:
    begins = sorted(call.before)
    return begins[bisect_right(begins, address) - 1]


def _write(call: Call, address: int, offsets: np.ndarray, values: np.ndarray) -> None:
    size = int(offsets.max(initial=-1) + 1) * values.itemsize
    assert address + size <= piece(call, address) + len(call.before[piece(call, address)])
    memory = np.frombuffer((c_char * size).from_address(address), values.dtype)
    memory[offsets] = values.flatten()


def write(to: CaseFile, case: Problem, name: str) -> None:
    """A call of each direction."""
    dtype = case.q.dtype
    d_out = torch.randn(*case.q.shape[:3], case.v.shape[-1]).to(dtype)
    d_lse = torch.randn(case.q.shape[:3])
    of = Reference.of(case, d_out, d_lse)
    given = Given(of.exact[0].to(dtype), of.exact[1].float())
    before = loader.search
    found = loader.Found(loader.Library("none", Path(), given))  # type: ignore[arg-type]
    loader.search = lambda: found  # type: ignore[assignment]
    try:
        results(case, "native", d_out, d_lse)
    finally:
        loader.search = before  # type: ignore[assignment]
    allowed = {
        name: allowance(
            exact,
            low,
            size,
            f"attention {str(dtype)[6:]} {name}",
            dtype,
            "portable" if name == "lse" else OF_PAIRS,
        )
        for name, exact, low, size in zip(NAMES, of.exact, of.low, of.terms, strict=False)
    }
    right = dict(zip(NAMES, of.exact, strict=False))
    for call, struct in given.calls:
        for at, data in call.before.items():
            to.memory(at, data)
        to.links(call.links.items())
        to.call(call)
        checked = ("out",) if call.function == "headway_forward" else ("dq", "dk", "dv")
        for what in checked:
            where, kind = getattr(struct, what), str(dtype)[6:]
            begin = piece(call, where.data)
            offsets = places(where, right[what]) + (where.data - begin) // dtype.itemsize
            numbers = (t.expand_as(right[what]).flatten().numpy() for t in (right[what], allowed[what]))
            to.check(f"{name} {what}", begin, kind, offsets, *numbers)
        if call.function == "headway_forward":
            begin = piece(call, struct.lse)
            offsets = np.arange(right["lse"].numel()) + (struct.lse - begin) // 4
            errs = allowed["lse"].expand_as(right["lse"]).flatten().numpy()
            to.check(f"{name} lse", begin, "float32", offsets, right["lse"].flatten().numpy(), errs)
        to.end(name)


def main() -> None:
    torch.manual_seed(0)
    more = zip(
        cycle(KINDS), cycle(LENGTHS), cycle(DIMS), cycle(HEADS), cycle(STEPS), cycle(DROPOUTS), strict=False
    )
    with CaseFile(Path(sys.argv[1])) as to:
        for dtype in (torch.float32, torch.bfloat16):
            for _ in range(3):
                for pattern, (kind, n, dims, heads, steps, dropout) in zip(PATTERNS, more, strict=False):
                    case = problem(pattern, kind, n, heads, dims, dtype, steps, dropout)
                    name = f"{pattern} {kind} {n} {heads} {dims} {str(dtype)[6:]} {steps} {dropout}"
                    write(to, case, name)
        print(f"{to.cases} cases, {to.checks} checks of {to.numbers} numbers")


if __name__ == "__main__":
    main()
