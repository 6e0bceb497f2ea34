"""The roofs of this machine, measured once a day and kept in a file, so that plans of one day agree with each other.

A busy machine measures low; of what is measured in a day, the highest counts.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import date, datetime
from pathlib import Path
from typing import NamedTuple

import torch

from headway import hardware
from headway.errors import CheckpointError
from headway.storage.files import atomic_write


class Roofs(NamedTuple):
    """Bytes/s that are read, FLOP/s of a matrix product, and when they were last measured (local time, ISO 8601)."""

    bandwidth: float
    peak: float
    measured: str


def kept(dtype: torch.dtype) -> Roofs | None:
    """What was measured today on this processor, with as many threads; None where nothing was."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(_file().read_text(encoding="utf-8"))[_key(dtype)]
        return Roofs(float(found["bandwidth"]), float(found["peak"]), str(found["measured"]))
    return None


def measured(dtype: torch.dtype) -> Roofs:
    """Measure (a second or two), and keep the highest of the day; a folder that cannot be written keeps nothing."""
    old, now = kept(dtype), datetime.now().isoformat(" ", "minutes")
    best = Roofs(hardware.read_bandwidth(), hardware.gemm_peak(dtype), now)
    if old is not None:
        best = Roofs(max(old.bandwidth, best.bandwidth), max(old.peak, best.peak), now)
    others = {}
    with suppress(OSError, ValueError):
        others = json.loads(_file().read_text(encoding="utf-8"))
    today = {key: value for key, value in others.items() if key.startswith(str(date.today()))}
    with suppress(OSError, CheckpointError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        atomic_write(_file(), json.dumps({**today, _key(dtype): best._asdict()}, indent=1) + "\n")
    return best


def _file() -> Path:
    """In the user's folder of caches (XDG base directories)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway" / "roofs.json"


def _key(dtype: torch.dtype) -> str:
    return f"{date.today()} {hardware.cpu_name()}, {torch.get_num_threads()} threads, {dtype}"
