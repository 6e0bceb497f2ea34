"""Writes attention, forward and backward, as cases for driver.cpp, with float64 results. Needs no kernel of this
machine: the backward reads what the formula gives for the forward.

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

from headway.native import interface
from tests.native.arm.calls import Call, running, taken
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
"""The level whose tolerances i8mm has, except for the logsumexp: its exponentials are not rounded."""
DROPOUTS = (0.0, 0.0, 0.0, 0.3)


@dataclass
class Given:
    """A stand-in for the library that returns the formula's results and records calls."""

    out: Tensor
    lse: Tensor
    calls: list[tuple[Call, interface.CallStruct]] = field(default_factory=list)

    def headway_forward(self, call: Any) -> int:
        self._take("headway_forward", call)
        recorded = self.calls[-1][0]
        struct = call._obj
        half = self.out.dtype == torch.bfloat16
        out = self.out.contiguous().view(torch.int16 if half else torch.float32).numpy()
        _write(recorded, struct.out.data, places(struct.out, self.out), out)
        _write(recorded, struct.lse, np.arange(self.lse.numel()), self.lse.numpy())
        return 0

    def headway_backward(self, call: Any) -> int:
        self._take("headway_backward", call)
        return 0

    def _take(self, function: str, call: Any) -> None:
        copied = interface.CallStruct.from_buffer_copy(call._obj)
        self.calls.append((taken(function, (call,)), copied))


def places(tensor: interface.TensorStruct, like: Tensor) -> np.ndarray:
    """Returns the offset of each element from the beginning of a tensor, in elements."""
    b, h, n, d = (torch.arange(size) for size in like.shape)
    first = (b * tensor.batch).view(-1, 1, 1, 1) + (h * tensor.head).view(-1, 1, 1)
    offsets: np.ndarray = (first + (n * tensor.slot).view(-1, 1) + d).flatten().numpy()
    return offsets


def piece(call: Call, address: int) -> int:
    begins = sorted(call.before)
    return begins[bisect_right(begins, address) - 1]


def _write(call: Call, address: int, offsets: np.ndarray, values: np.ndarray) -> None:
    size = int(offsets.max(initial=-1) + 1) * values.itemsize
    assert address + size <= piece(call, address) + len(call.before[piece(call, address)])
    memory = np.frombuffer((c_char * size).from_address(address), values.dtype)
    memory[offsets] = values.flatten()


def write(file: CaseFile, case: Problem, name: str) -> None:
    """Writes one call of each direction."""
    dtype = case.q.dtype
    d_out = torch.randn(*case.q.shape[:3], case.v.shape[-1]).to(dtype)
    d_lse = torch.randn(case.q.shape[:3])
    reference = Reference.of(case, d_out, d_lse)
    recorder = Given(reference.exact[0].to(dtype), reference.exact[1].float())
    with running(recorder):
        results(case, "native", d_out, d_lse)
    allowed = {
        name: allowance(
            exact,
            low,
            size,
            f"attention {str(dtype)[6:]} {name}",
            dtype,
            "portable" if name == "lse" else OF_PAIRS,
        )
        for name, exact, low, size in zip(
            NAMES, reference.exact, reference.low, reference.terms, strict=False
        )
    }
    expected = dict(zip(NAMES, reference.exact, strict=False))
    for call, struct in recorder.calls:
        for address, data in call.before.items():
            file.memory(address, data)
        file.links(call.links.items())
        file.call(call)
        outputs = ("out",) if call.function == "headway_forward" else ("dq", "dk", "dv")
        for output in outputs:
            tensor, kind = getattr(struct, output), str(dtype)[6:]
            begin = piece(call, tensor.data)
            offsets = places(tensor, expected[output]) + (tensor.data - begin) // dtype.itemsize
            numbers = (
                t.expand_as(expected[output]).flatten().numpy() for t in (expected[output], allowed[output])
            )
            file.check(f"{name} {output}", begin, kind, offsets, *numbers)
        if call.function == "headway_forward":
            begin = piece(call, struct.lse)
            offsets = np.arange(expected["lse"].numel()) + (struct.lse - begin) // 4
            tolerances = allowed["lse"].expand_as(expected["lse"]).flatten().numpy()
            file.check(
                f"{name} lse", begin, "float32", offsets, expected["lse"].flatten().numpy(), tolerances
            )
        file.end(name)


def main() -> None:
    torch.manual_seed(0)
    settings = zip(
        cycle(KINDS), cycle(LENGTHS), cycle(DIMS), cycle(HEADS), cycle(STEPS), cycle(DROPOUTS), strict=False
    )
    with CaseFile(Path(sys.argv[1])) as file:
        for dtype in (torch.float32, torch.bfloat16):
            for _ in range(3):
                for pattern, (kind, n, dims, heads, steps, dropout) in zip(PATTERNS, settings, strict=False):
                    case = problem(pattern, kind, n, heads, dims, dtype, steps, dropout)
                    name = f"{pattern} {kind} {n} {heads} {dims} {str(dtype)[6:]} {steps} {dropout}"
                    write(file, case, name)
        print(f"{file.cases} cases, {file.checks} checks of {file.numbers} numbers")


if __name__ == "__main__":
    main()
