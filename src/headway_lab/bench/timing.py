"""How it is timed: sides take turns, in an order that turns too, and ratios are taken within a turn.

On a shared machine the speed drifts by more than kernels differ. What ran side by side met the same weather, so
a ratio is the median of the ratios of the turns, and a share of the limit is taken against the limit measured in
the same turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Effort:
    """How long to measure: at most `repeats` turns, fewer (but `least`) where they take over `seconds` in all;
    calls shorter than `sample` seconds are repeated within a turn."""

    repeats: int = 9
    least: int = 3
    sample: float = 0.02
    seconds: float = 30.0


WELL = Effort()
QUICK = Effort(repeats=3, seconds=1.5, sample=0.01)


@dataclass(frozen=True)
class Samples:
    """Seconds per call of every side, and the limit's rate, turn by turn."""

    seconds: dict[str, list[float]]
    limit: list[float]

    def milliseconds(self, side: str) -> float:
        """The median of a side."""
        return median(self.seconds[side]) * 1e3

    def ratio(self, side: str, ours: str) -> float:
        """How many times as long `side` takes: the median over the turns."""
        return median(a / b for a, b in zip(self.seconds[side], self.seconds[ours], strict=True))

    def share(self, side: str, work: float) -> float:
        """`work` (FLOPs or bytes) over the time of `side`, as a share of the limit of the same turn."""
        pairs = zip(self.seconds[side], self.limit, strict=True)
        return median(work / seconds / limit for seconds, limit in pairs)


def interleave(
    sides: Mapping[str, Callable[[], object]], limit: Callable[[], float], effort: Effort
) -> Samples:
    """Measure all sides in turns, after a call of each to warm up; every turn begins with the next side."""
    counts, length = {}, 0.0
    for name, call in sides.items():
        call()
        took = _timed(call, 1)
        counts[name] = max(1, math.ceil(effort.sample / max(took, 1e-9)))
        length += took * counts[name]
    limit()
    turns = max(effort.least, min(effort.repeats, int(effort.seconds / length)))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    limits, names = [], list(sides)
    for turn in range(turns):
        limits.append(limit())
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(_timed(sides[name], counts[name]))
    return Samples(seconds, limits)


def _timed(call: Callable[[], object], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count
