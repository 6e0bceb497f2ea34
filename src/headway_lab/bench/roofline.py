"""What this machine could do at best, measured in the same turn as what it bounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from headway import hardware
from headway.native.loader import search

PRODUCT = 1024
"""Side of the matrix product that stands in for the register peak."""

READ_BYTES = 256 << 20
PEAK_SECONDS = 0.03


@dataclass(frozen=True)
class Limit:
    """A rate that nothing exceeds: `measure()` in FLOP/s or bytes/s at the present thread count."""

    name: str
    measure: Callable[[], float]


def products(dtype: torch.dtype) -> Limit:
    """The register peak for `dtype`: multiply-adds that touch no memory. Where no native library can measure
    it, the rate of torch's matrix product instead, which is less (and the row says so)."""
    found = search().library
    if found is not None:
        # A level without bf16 instructions multiplies in float32.
        native = found.peak(dtype, seconds=PEAK_SECONDS) > 0
        form = dtype if native else torch.float32
        return Limit("register peak", lambda: found.peak(form, seconds=PEAK_SECONDS))
    a = torch.ones(PRODUCT, PRODUCT, dtype=dtype)

    def measure() -> float:
        begin = time.perf_counter()
        with torch.no_grad():
            torch.matmul(a, a)
        return 2.0 * PRODUCT**3 / (time.perf_counter() - begin)

    measure()
    return Limit("torch's matrix product", measure)


def reads() -> Limit:
    """One pass over memory many times any cache, by all threads."""
    data = torch.ones(max(1 << 20, min(READ_BYTES, hardware.memory_available() // 8)) // 4)
    found = search().library
    if found is not None:
        return Limit("read of memory", lambda: data.nbytes / found.read_seconds(data))

    def measure() -> float:
        begin = time.perf_counter()
        data.sum()
        return data.nbytes / (time.perf_counter() - begin)

    measure()
    return Limit("read of memory by torch's sum", measure)


def limit(bound: str, dtype: torch.dtype) -> Limit:
    """The limit of work that is bound by "products" or by "reads"."""
    return reads() if bound == "reads" else products(dtype)
