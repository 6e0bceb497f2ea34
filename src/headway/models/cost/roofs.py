"""The roofs of this machine: bytes/s that are read, and FLOP/s of a matrix product of a dtype.

A busy machine measures low, and never high: of what was measured within a day the highest counts. It is kept in a file,
so that plans agree with each other; and where the last measurement is older than `AGAIN`, it is repeated (less than a
second), so that one quiet moment of a day is enough.

    16 GB/s, 3 h ago, under load; 35 GB/s, 20 min ago; 21 GB/s now    -> 35 GB/s, 20 min old
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from headway import hardware
from headway.errors import CheckpointError
from headway.storage.files import atomic_write

AGAIN, DAY = 600.0, 86400.0
"""Seconds after which a roof is measured again, and after which a measurement no longer counts."""


class Roof(NamedTuple):
    """The highest rate of a day, when it was measured, and when it was last measured at all (seconds since 1970)."""

    rate: float
    measured: float
    tried: float


def roof(dtype: torch.dtype | None, *, again: bool = False) -> Roof:
    """Of the matrix product in `dtype`; None: of reading memory. With `again` it is measured whatever was kept; a
    folder that cannot be written keeps nothing."""
    now, key = time.time(), _key(dtype)
    kept = _kept(now)
    best = kept.get(key)
    if best is not None and not again and now - best.tried < AGAIN:
        return best
    measure: Callable[[], float] = (
        hardware.read_bandwidth if dtype is None else lambda: hardware.gemm_peak(dtype)
    )
    found = Roof(measure(), now, now)
    if best is not None and best.rate > found.rate:
        found = best._replace(tried=now)
    with suppress(OSError, CheckpointError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        atomic_write(_file(), json.dumps({**kept, key: found}, indent=1) + "\n")
    return found


def is_fresh(dtype: torch.dtype | None) -> bool:
    """Whether `roof` answers without measuring."""
    now = time.time()
    found = _kept(now).get(_key(dtype))
    return found is not None and now - found.tried < AGAIN


def _kept(now: float) -> dict[str, Roof]:
    """What was measured within a day, here or on another processor that shares the file."""
    found: dict[str, Roof] = {}
    with suppress(OSError, ValueError, AttributeError):
        for key, value in json.loads(_file().read_text(encoding="utf-8")).items():
            with suppress(TypeError, ValueError):
                found[key] = Roof(*map(float, value))
    return {key: one for key, one in found.items() if 0 <= now - one.measured < DAY}


def _file() -> Path:
    """In the user's folder of caches (XDG base directories)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway" / "roofs.json"


def _key(dtype: torch.dtype | None) -> str:
    what = "memory" if dtype is None else str(dtype).removeprefix("torch.")
    return f"{hardware.cpu_name()}, {torch.get_num_threads()} threads, {what}"
