"""One row of the bench: measured here, checked, and said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headway.errors import BackendError
from headway_lab.bench.cases import TRAIN, Case
from headway_lab.bench.machine import machine
from headway_lab.bench.peers import Unfit, floor
from headway_lab.bench.problems import OURS, Problem, build
from headway_lab.bench.roofline import limit
from headway_lab.bench.timing import Effort, Samples, interleave

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
"""How far two outputs may differ in a row of them, relative to its norm: rounding leaves a third of that or less,
while a window that is off by one key in 512 differs by 1 / sqrt(512) = 4e-2. Gradients may differ twice as far."""


@dataclass(frozen=True)
class Row:
    """A result. `rate` is useful work per second (FLOP/s, or bytes/s where `bound` is "reads"); `ratios` say how many
    times as long each peer takes. Where nothing could be measured, the numbers are None and `notes` say why."""

    bench: str
    case: str
    dtype: str
    bound: str = "products"
    ours_ms: float | None = None
    rate: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    ratio_best_tuned: float | None = None
    share_of_limit: float | None = None
    machine: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        notes: list[str] = self.machine.get("notes", [])
        return notes

    @property
    def ratio_best_peer(self) -> float | None:
        """How many times as long the best peer takes. Headway's own other case counts only where it is alone."""
        others = {name: value for name, value in self.ratios.items() if not name.startswith(OURS)}
        return min((others or self.ratios).values(), default=None)

    def to_json(self) -> dict[str, Any]:
        """The row with exactly the keys that docs/benchmarks.md lists."""
        unit = "ours_gbs" if self.bound == "reads" else "ours_gflops"
        return {
            "bench": self.bench,
            "case": self.case,
            "dtype": self.dtype,
            "ours_ms": self.ours_ms,
            unit: None if self.rate is None else self.rate / 1e9,
            "peers": self.peers,
            "ratio_best_peer": self.ratio_best_peer,
            "ratio_best_tuned": self.ratio_best_tuned,
            "share_of_limit": self.share_of_limit,
            **self.extra,
            "machine": self.machine,
        }


def measure(case: Case, dtype: str, direction: str, backend: str, effort: Effort) -> Row:
    """One row, measured in this process."""
    where = {**machine(), "backend": backend, "notes": []}
    blank = Row("attention", case.label(direction), dtype, machine=where)
    try:
        problem = build(case, dtype, direction, backend)
        compare(problem, dtype, direction)
    except (Unfit, BackendError) as why:
        where["notes"].append(f"not measured: {why}")
        return blank
    bound = limit(problem.bound, getattr(torch, dtype))
    samples = interleave(problem.sides, bound.measure, effort)
    return judged(blank, problem, samples, bound.name, case.ease)


def judged(blank: Row, problem: Problem, samples: Samples, limit_name: str, ease: float) -> Row:
    """The row that the samples make, with a note for each peer below its floor."""
    where = blank.machine
    middle = sorted(samples.limit)[len(samples.limit) // 2]
    where |= {"limit": limit_name, "limit_rate": middle / 1e9, "turns": len(samples.limit)}
    where["notes"] = [*where["notes"], *problem.notes]
    peers, ratios = {}, {}
    for side in problem.sides:
        scale = problem.scale.get(side, 1.0)
        if side == OURS:
            continue
        peers[side] = samples.milliseconds(side) * scale
        ratios[side] = samples.ratio(side, OURS) * scale
        share, least = samples.share(side, problem.work / scale), floor(side, blank.dtype) * ease
        if share < least:
            where["notes"].append(
                f"{side} is below its floor ({share:.1%} of the limit, not {least:.1%}): this machine is busy or of "
                "another kind, and the row does not count"
            )
    return Row(
        blank.bench,
        blank.case,
        blank.dtype,
        problem.bound,
        samples.milliseconds(OURS),
        problem.work / (samples.milliseconds(OURS) / 1e3),
        peers,
        ratios,
        None,
        samples.share(OURS, problem.work),
        where,
    )


def compare(problem: Problem, dtype: str, direction: str) -> None:
    """Take out the peers whose outputs are not ours, with a note."""
    ours = problem.sides[OURS]()
    for name in [n for n in problem.sides if n != OURS and n not in problem.unlike]:
        theirs = problem.sides[name]()
        apart = [difference(a, b) for a, b in zip(ours, theirs, strict=True)]
        allowed = [TOLERANCE[dtype] * (1 if i == 0 else 2) for i in range(len(apart))]
        if any(not a <= most for a, most in zip(apart, allowed, strict=True)):
            del problem.sides[name]
            what = "output and gradients" if direction == TRAIN else "output"
            problem.notes.append(
                f"{name} is left out: its {what} differ from ours by {', '.join(f'{a:.1e}' for a in apart)} "
                f"(up to {', '.join(f'{a:.0e}' for a in allowed)} is rounding)"
            )


def difference(a: Tensor, b: Tensor) -> float:
    """The largest |a - b| of a row, relative to the row's norm in b, or to the mean norm where that is larger."""
    x, y = (t.detach().double().flatten(0, -2) for t in (a, b))
    norms = y.norm(dim=-1)
    apart = (x - y).norm(dim=-1) / norms.clamp_min(max(norms.mean().item(), 1e-30))
    return apart.max().item() if apart.numel() else 0.0


def unlike(rows: Sequence[Row]) -> list[str]:
    """The notes of peers that gave another result: not a matter of speed."""
    return [f"{row.case} {row.dtype}: {note}" for row in rows for note in row.notes if "is left out" in note]
