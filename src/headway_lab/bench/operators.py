"""Every operator of a step beside what limits it: the rows of `--operators`.

An operator reads or writes so many bytes and does so many FLOPs. With the rates that the same run measures,

    least = max(bytes / read bandwidth, FLOPs / product peak)        share = least / time

and the larger of the two is what limits it (the roofline of Williams et al. 2009). Bytes are those of an operator's
tensors, once each: where they are still in a cache, a share may exceed 1. Calls of the native kernels are timed one by
one, a step of decoding operator by operator; torch's operators by its profiler, without those that they call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

import torch

from headway.models.cost import attention_pairs, kv_bytes_read
from headway.models.cost.operations import keys_read
from headway_lab.bench.measure import LIMITS, Limit
from headway_lab.bench.native_operators import ATTENTION, ATTENTION_BACKWARD, native_calls
from headway_lab.bench.rows import Row, machine
from headway_lab.bench.steps import Step
from headway_lab.bench.torch_operators import Found, torch_operators
from headway_lab.profiling import fastest

BENCH = "operators"
REST = "all else, and Python"
LEAST = 0.004
"""The share of a step below which an operator is not listed by itself."""


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
        found.append(_operators(call, step.decodes))
    whole, best = median(wholes), {name: median(some) for name, some in rates.items()}
    operators = [
        one._replace(seconds=median(each[name].seconds if name in each else 0.0 for each in found))
        for name, one in found[0].items()
    ]
    listed = sorted(
        (_with_attention(one, step) for one in operators if one.seconds >= LEAST * whole),
        key=lambda one: -one.seconds,
    )
    rest = Found(REST, max(0.0, whole - sum(one.seconds for one in listed)))
    return [_row(one, step, whole, best, limits) for one in (*listed, rest)]


def _operators(call: Callable[[], object], decodes: bool) -> dict[str, Found]:
    with native_calls() as calls:
        others = [] if decodes else torch_operators(call)
        if decodes:
            call()
    by: dict[str, Found] = {}
    for one in (*calls, *others):
        by[one.name] = by[one.name].with_calls(one) if one.name in by else one
    return by


def _with_attention(one: Found, step: Step) -> Found:
    """FLOPs of attention: 4 D for each pair that is seen, 2.5 times that backward; of a step of decoding also the
    bytes of keys and values."""
    spec = step.spec
    if one.name not in (ATTENTION, ATTENTION_BACKWARD):
        return one
    if step.decodes:
        pairs = sum(keys_read(pattern, step.tokens, spec.heads) for pattern in spec.patterns)
        read = kv_bytes_read(spec, step.tokens, getattr(torch, step.dtype), step.rows)
        one = one._replace(bytes=float(read))
    else:
        pairs = attention_pairs(spec, step.tokens, step.last)
    times = 1.0 if one.name == ATTENTION else 2.5
    return one._replace(flops=times * 4.0 * spec.head_dim * pairs * step.rows)


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
