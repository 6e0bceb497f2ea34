"""Measures a row: outputs are compared first, then all sides take turns, and ratios are taken within a turn.

On a shared machine the speed drifts by more than kernels differ. Calls in the same turn run under the same
conditions, so a ratio is the median of the ratios of the turns, and a share of the limit is relative to the limit
measured in the same turn."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median, median_high
from typing import Any

import torch
from torch import Tensor

from headway import hardware
from headway.errors import BackendError
from headway.native.loader import search
from headway_lab.bench.inputs import OURS, Problem, UnsupportedCase
from headway_lab.bench.llama_cpp import NAME as LLAMA_CPP
from headway_lab.bench.llama_cpp import system_info
from headway_lab.bench.rows import Row, machine

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
"""Largest difference of a row of two outputs, relative to its norm: rounding causes a third of that or less, while a
window that is off by one key in 512 differs by 1 / sqrt(512) = 4e-2. Gradients may differ by twice as much."""


@dataclass(frozen=True)
class Effort:
    """How long to measure: at most `repeats` turns, fewer (but at least `least`) if they would take over `seconds` in
    all; calls shorter than `sample` seconds are repeated within a turn."""

    repeats: int = 9
    least: int = 3
    sample: float = 0.02
    seconds: float = 30.0


THOROUGH = Effort()
QUICK = Effort(repeats=3, seconds=1.5, sample=0.01)


@dataclass(frozen=True)
class Samples:
    """Seconds per call of every side, and the rate of the limit, by turn."""

    seconds: dict[str, list[float]]
    limit: list[float]

    def milliseconds(self, side: str) -> float:
        """Returns the median milliseconds of a side."""
        return median(self.seconds[side]) * 1e3

    def ratio(self, side: str, ours: str) -> float:
        """Returns how many times as long `side` takes as `ours`: the median over the turns."""
        return median(a / b for a, b in zip(self.seconds[side], self.seconds[ours], strict=True))

    def share(self, side: str, work: float) -> float:
        """Returns `work` (FLOPs or bytes) per second of `side`, as a share of the limit of the same turn: the
        median."""
        return median(work / a / limit for a, limit in zip(self.seconds[side], self.limit, strict=True))


def interleave(
    sides: Mapping[str, Callable[[], object]], limit: Callable[[], float], effort: Effort
) -> Samples:
    """Measures all sides in turns, after two warm-up calls of each (the second sets the number of calls in a turn);
    every turn begins with the next side."""
    counts, length = {}, 0.0
    for name, call in sides.items():
        call()
        took = _timed(call, 1)
        counts[name] = max(1, math.ceil(effort.sample / max(took, 1e-9)))
        length += took * counts[name]
    limit()
    turns = max(effort.least, min(effort.repeats, int(effort.seconds / length)))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    limits, names = [], deque(sides)
    for _ in range(turns):
        limits.append(limit())
        for name in names:
            seconds[name].append(_timed(sides[name], counts[name]))
        names.rotate(-1)
    return Samples(seconds, limits)


def _timed(call: Callable[[], object], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def measured(
    bench: str, case: str, dtype: str, make: Callable[[], Problem], effort: Effort, backend: str = "auto"
) -> Row:
    """Returns a row with the times of a problem's sides, without peers whose results differ, and with a note if the
    problem cannot be made."""
    blank = Row(bench, case, dtype, machine=machine(backend))
    try:
        problem = make()
        drop_mismatches(problem, dtype)
    except (UnsupportedCase, BackendError) as reason:
        blank.notes.append(f"not measured: {reason}")
        return blank
    bound = LIMITS[problem.bound](getattr(torch, dtype))
    row = summarized(blank, problem, interleave(problem.sides, bound.measure, effort), bound.name)
    if problem.peak is not None:
        try:
            peaks = {side: problem.peak(side) / 2**20 for side in problem.sides}
            row.extra.update(ours_mib=peaks.pop(OURS), peers_mib=peaks)
        except BackendError as reason:
            row.notes.append(f"memory not measured: {reason}")
    if LLAMA_CPP in row.peers:
        row.machine[LLAMA_CPP] = system_info()
    return row


def summarized(blank: Row, problem: Problem, samples: Samples, limit_name: str) -> Row:
    """Returns `blank` filled with the results of the samples."""
    peers, ratios, notes = {}, {}, [*blank.notes, *problem.notes]
    for side in problem.sides:
        if side != OURS:
            scale = problem.scale.get(side, 1.0)
            peers[side] = samples.milliseconds(side) * scale
            ratios[side] = samples.ratio(side, OURS) * scale
    ours_ms, rate = samples.milliseconds(OURS), median_high(samples.limit) / 1e9
    conditions = {"limit": limit_name, "limit_rate": rate, "turns": len(samples.limit), "notes": notes}
    extra: dict[str, Any] = {}
    if problem.tokens is not None:
        extra["tokens_per_second"] = problem.tokens / ours_ms * 1e3
        extra["peers_tokens_per_second"] = {side: problem.tokens / ms * 1e3 for side, ms in peers.items()}
        extra["bytes" if problem.bound == "reads" else "flops"] = problem.work
    return replace(
        blank,
        bound=problem.bound,
        ours_ms=ours_ms,
        rate=problem.work / (ours_ms / 1e3),
        peers=peers,
        ratios=ratios,
        share_of_limit=samples.share(OURS, problem.work),
        extra=extra,
        machine={**blank.machine, **conditions},
    )


def drop_mismatches(problem: Problem, dtype: str) -> None:
    """Removes the peers whose outputs differ from headway's beyond rounding, with a note."""
    ours = problem.sides[OURS]()
    tolerance = problem.tolerance or TOLERANCE[dtype]
    allowed = [tolerance, *[2 * tolerance] * (len(ours) - 1)]
    for name in [n for n in problem.sides if n != OURS and n not in problem.scale]:
        differences = [difference(a, b) for a, b in zip(ours, problem.sides[name](), strict=True)]
        if any(not a <= tolerance for a, tolerance in zip(differences, allowed, strict=True)):
            del problem.sides[name]
            problem.notes.append(
                f"{name} is left out: its results differ from ours by {', '.join(f'{a:.1e}' for a in differences)} "
                f"(up to {', '.join(f'{a:.0e}' for a in allowed)} is rounding)"
            )


def difference(a: Tensor, b: Tensor) -> float:
    """Returns the largest |a - b| over rows, relative to the row's norm in b, or to the mean norm if that is larger."""
    x, y = (t.detach().double().flatten(0, -2) for t in (a, b))
    norms = y.norm(dim=-1)
    distances = (x - y).norm(dim=-1) / norms.clamp_min(max(norms.mean().item(), 1e-30))
    return distances.max().item() if distances.numel() else 0.0


def mismatches(rows: Sequence[Row]) -> list[str]:
    """Returns the notes about peers whose results differ: these are errors, not differences in speed."""
    return [f"{row.case} {row.dtype}: {note}" for row in rows for note in row.notes if "is left out" in note]


# -- limits: what this machine could do at best --------------------------------------------------------------------


READ_BYTES = 256 << 20
PEAK_SECONDS = 0.03


@dataclass(frozen=True)
class Limit:
    """An upper bound on a rate: `measure()` returns it in FLOP/s or bytes/s at the current thread count."""

    name: str
    measure: Callable[[], float]


def products(dtype: torch.dtype) -> Limit:
    """Returns the register peak for `dtype`: multiply-adds that touch no memory. Without a native library to measure
    it, the rate of torch's matrix product, which is lower (the row says which limit it is)."""
    kernels = search().library
    if kernels is None:
        return Limit("torch's matrix product", partial(hardware.gemm_peak.__wrapped__, dtype))
    # A level without bf16 instructions multiplies in float32.
    peak_dtype = dtype if kernels.peak(dtype, seconds=PEAK_SECONDS) > 0 else torch.float32
    return Limit("register peak", lambda: kernels.peak(peak_dtype, seconds=PEAK_SECONDS))


def reads(dtype: torch.dtype) -> Limit:
    """Returns the read bandwidth: one pass of all threads over memory many times larger than any cache."""
    kernels = search().library
    if kernels is None:
        return Limit("read of memory by torch's sum", hardware.read_bandwidth.__wrapped__)
    data = torch.empty(max(1 << 20, min(READ_BYTES, hardware.memory_available() // 8)) // 4)
    hardware.large_pages([data])
    data.fill_(1)
    return Limit("read of memory", lambda: data.nbytes / kernels.read_seconds(data))


LIMITS: Mapping[str, Callable[[torch.dtype], Limit]] = {"products": products, "reads": reads}
"""The limits, keyed by `Problem.bound`."""
