"""What this machine could do at best, measured in the same turn as what it bounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from headway import hardware
from headway.native.loader import search

PRODUCT = 1024
"""Rows and columns of the matrix product that substitutes for the register peak."""

READ_BYTES = 256 << 20
PEAK_SECONDS = 0.03


@dataclass(frozen=True)
class Limit:
    """A rate that nothing exceeds: `measure()` in FLOP/s or bytes/s at the present thread count."""

    name: str
    measure: Callable[[], float]


def limit(bound: str, dtype: torch.dtype) -> Limit:
    """The limit of work that is bound by "products" in registers, by torch's own "matmul", or by "reads"."""
    return {"products": products, "matmul": matmul, "reads": reads}[bound](dtype)


def products(dtype: torch.dtype) -> Limit:
    """The register peak for `dtype`: multiply-adds that touch no memory. Without a native library to measure it,
    the rate of torch's matrix product, which is lower (and the row says so)."""
    found = search().library
    if found is None:
        return matmul(dtype)
    # A level without bf16 instructions multiplies in float32.
    form = dtype if found.peak(dtype, seconds=PEAK_SECONDS) > 0 else torch.float32
    return Limit("register peak", lambda: found.peak(form, seconds=PEAK_SECONDS))


def matmul(dtype: torch.dtype) -> Limit:
    """torch's matrix product."""
    a = torch.ones(PRODUCT, PRODUCT, dtype=dtype)
    return _timed("torch's matrix product", lambda: torch.matmul(a, a), 2.0 * PRODUCT**3)


def reads(dtype: torch.dtype) -> Limit:
    """One pass over memory many times any cache, by all threads."""
    data = torch.ones(max(1 << 20, min(READ_BYTES, hardware.memory_available() // 8)) // 4)
    found = search().library
    if found is None:
        return _timed("read of memory by torch's sum", data.sum, data.nbytes)
    return Limit("read of memory", lambda: data.nbytes / found.read_seconds(data))


def _timed(name: str, call: Callable[[], object], work: float) -> Limit:
    """The rate at which `call` does `work`, after a call to warm up."""

    def measure() -> float:
        begin = time.perf_counter()
        with torch.no_grad():
            call()
        return work / (time.perf_counter() - begin)

    measure()
    return Limit(name, measure)
