"""Every operator of a step of decoding beside what limits it: the rows of `--operators`.

An operator reads or writes so many bytes and does so many FLOPs. With the rates that the same run measures,

    least = max(bytes / read bandwidth, FLOPs / product peak)        share = least / time

and the larger of the two is what limits it (the roofline of Williams et al. 2009). Bytes are those of an operator's
tensors, once each: where they are still in a cache, a share may exceed 1. A step is one call of the native kernels,
which torch's profiler does not see into: its operators are run and timed one by one.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch

from headway.models.cost import kv_bytes_read
from headway.models.cost.operations import keys_read
from headway.native import interface as c
from headway.native.loader import search
from headway.native.panels import PANEL
from headway.nn.weights.nf4 import BLOCK as NF4_BLOCK
from headway_lab.bench.measure import LIMITS, Limit
from headway_lab.bench.rows import Row, machine
from headway_lab.bench.steps import Step
from headway_lab.profiling import fastest

BENCH = "operators"
ATTENTION = "attention"
BLOCK = ("q, k, v", "rotations, cache", ATTENTION, "out", "gate, up", "down")
"""The native operators of a LLaMA's block, in their order (`DecodeStep`)."""
LOGITS = "logits"
REST = "all else, and Python"
LEAST = 0.004
"""The share of a step below which an operator is not listed by itself."""
SIZES = {number: dtype.itemsize for dtype, number in c.TYPES.items()}


class Found(NamedTuple):
    """Calls of an operator, together."""

    name: str
    seconds: float
    bytes: float = 0.0
    flops: float = 0.0
    calls: int = 1


def taken_apart(step: Step, repeats: int) -> list[Row]:
    """A row for each operator, the longest first; the last is all else. Times are medians over `repeats` steps."""
    kind = getattr(torch, step.dtype)
    limits, call = {bound: make(kind) for bound, make in LIMITS.items()}, step.ours()
    call()
    rates: dict[str, list[float]] = {name: [] for name in limits}
    wholes, found = [], []
    for _ in range(repeats):
        for name, limit in limits.items():
            rates[name].append(limit.measure())
        wholes.append(fastest(call, 1))
        with native_operators() as calls:
            call()
        found.append(calls)
    whole, best = median(wholes), {name: median(some) for name, some in rates.items()}
    operators = [
        one._replace(seconds=median(each[name].seconds for each in found)) for name, one in found[0].items()
    ]
    listed = sorted(
        (_with_attention(one, step) for one in operators if one.seconds >= LEAST * whole),
        key=lambda one: -one.seconds,
    )
    rest = Found(REST, max(0.0, whole - sum(one.seconds for one in listed)))
    return [_row(one, step, whole, best, limits) for one in (*listed, rest)]


@contextmanager
def native_operators() -> Iterator[dict[str, Found]]:
    """The operators of the native steps inside the block, by their names; none without a library."""
    found: dict[str, Found] = {}
    library = search().library
    if library is None:
        yield found
        return
    dll: Any = library.dll
    whole = dll.headway_step

    def in_parts(ops: Any, count: Any, threads: Any) -> int:
        for i in range(count.value):
            one, alone = ctypes.byref(ops, i * ctypes.sizeof(c.OpStruct)), ctypes.c_int64(1)
            begin = time.perf_counter()
            if code := whole(one, alone, threads):
                return int(code)
            seconds = time.perf_counter() - begin
            name = LOGITS if i == len(ops) - 1 else BLOCK[i % len(BLOCK)]
            size, flops = _work(ops[i])
            before = found.get(name, Found(name, 0.0, calls=0))
            found[name] = Found(
                name, before.seconds + seconds, before.bytes + size, before.flops + flops, before.calls + 1
            )
        return 0

    dll.headway_step = in_parts
    try:
        yield found
    finally:
        dll.headway_step = whole


def _work(op: Any) -> tuple[float, float]:
    """Bytes and FLOPs of an operator, from what it is called with; those of attention depend on the pattern."""
    if op.kind == c.PRODUCTS:
        s: Any = c.ProductsStruct.from_address(op.of)
        matrices = s.matrices[: s.count]
        outputs = sum(one.outputs for one in matrices)
        weights = sum(_weight_bytes(one, s.inputs) for one in matrices)
        return weights + s.rows * SIZES[s.type] * (s.inputs + outputs), 2.0 * s.rows * s.inputs * outputs
    if op.kind == c.HEADS:
        s = c.HeadsStruct.from_address(op.of)
        numbers = s.rows * (s.heads * s.dim + s.kv_heads * (s.dim + s.dim_v))
        return 2 * numbers * SIZES[s.type], 0.0
    return 0.0, 0.0


def _weight_bytes(matrix: Any, inputs: int) -> int:
    panels = c.INT8 <= matrix.type < c.COMPRESSED
    rows = -(-matrix.outputs // PANEL) if panels else matrix.outputs
    scales = inputs // NF4_BLOCK if matrix.type == c.NF4 else 0
    size: int = rows * (matrix.step + scales)
    return size


def _with_attention(one: Found, step: Step) -> Found:
    """Of attention the bytes of keys and values, and FLOPs: 4 D for each pair that is seen."""
    if one.name != ATTENTION:
        return one
    spec = step.spec
    pairs = sum(keys_read(pattern, step.tokens, spec.heads) for pattern in spec.patterns)
    read = kv_bytes_read(spec, step.tokens, getattr(torch, step.dtype), step.rows)
    return one._replace(bytes=float(read), flops=4.0 * spec.head_dim * pairs * step.rows)


def _row(one: Found, step: Step, whole: float, best: Mapping[str, float], limits: Mapping[str, Limit]) -> Row:
    work = {"reads": one.bytes, "products": one.flops}
    least = {name: work[name] / best[name] for name in limits}
    bound = max(least, key=lambda name: least[name])
    counted = bool(work[bound] and one.seconds)
    return Row(
        BENCH,
        f"{step.bench} {step.name}: {one.name}",
        step.dtype,
        bound=bound,
        ours_ms=one.seconds * 1e3,
        rate=work[bound] / one.seconds if counted else None,
        share_of_limit=least[bound] / one.seconds if counted else None,
        extra={
            "calls": one.calls,
            "bytes": one.bytes,
            "flops": one.flops,
            "share_of_step": one.seconds / whole,
            "step_ms": whole * 1e3,
            "tokens_per_second": step.tokens_done / whole,
            "read_gbs": best["reads"] / 1e9,
            "peak_gflops": best["products"] / 1e9,
        },
        machine={**machine("auto"), "limit": limits[bound].name, "limit_rate": best[bound] / 1e9},
    )
