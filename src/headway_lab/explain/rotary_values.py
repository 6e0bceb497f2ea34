"""Why values are not rotated: the effect of a shift of all positions on the output. (Su et al. 2021, section 3.2.)"""

from collections.abc import Iterator, Sequence
from statistics import fmean

import torch
from torch import Tensor

from headway.attention import attend
from headway.patterns import Causal
from headway.positions import Rotary
from headway_lab.explain.figures import Axes, label_axes, panels
from headway_lab.explain.offset_task import OFFSET, SEEDS, STEPS, named, train
from headway_lab.explain.offset_task import TOKENS as ROW
from headway_lab.explain.report import Report, Row, Rows, by_seed
from headway_lab.explain.spread import every, gap
from headway_lab.profiling import normal

TOKENS, HEADS, HEAD_DIM, SHIFTS = 48, 2, 64, (1, 10, 100, 1000)
EQUAL = 1e-12
AWAY = f"right, s = {SHIFTS[-1]}"
ROTARY = Rotary(pairing="adjacent")
VALUES = {
    "plain": (ROTARY, False),
    "turned": (Rotary(pairing="adjacent", values=True), False),
    "turned and back": (Rotary(pairing="adjacent", values=True), True),
}


def run(*, seeds: Sequence[int] = SEEDS, steps: int = STEPS) -> Iterator[Row]:
    """Yields, for each way to treat values, the change of a random layer's output under shifts, and the accuracy of a
    trained layer with and without a shift."""
    for values, (rotary, back) in VALUES.items():
        changed = [moved(values, shift, seeds[0]) for shift in SHIFTS]
        trained = [train(rotary, (OFFSET,), back=back, steps=steps, seed=seed) for seed in seeds]
        near, away = ([t.accuracy(start) for t in trained] for start in (0, SHIFTS[-1]))
        yield {
            "values": values,
            **{f"change, s = {s}": change for s, (change, _) in zip(SHIFTS, changed, strict=True)},
            "from R_s out": max(off for _, off in changed),
            "right, s = 0": fmean(near),
            AWAY: fmean(away),
            **{f"seed {seed}": share for seed, share in zip(seeds, away, strict=True)},
        }


def changes(row: Row) -> list[float]:
    """Returns the changes of the output at each of `SHIFTS`."""
    return [row[f"change, s = {s}"] for s in SHIFTS]


def judge(rows: Rows) -> Report:
    """Returns the verdict: only rotated values notice the shift, by exactly R_s, and what is learned with them
    breaks."""
    plain, turned, back = rows
    return Report(
        rows=tuple(rows),
        claims={
            "plain": max(changes(plain)) < EQUAL,
            "back": max(changes(back)) < EQUAL,
            "turned": min(changes(turned)) > 0.05,
            "whole": turned["from R_s out"] < EQUAL,
            "lost": every(gap(by_seed(turned), by_seed(unrotated)).lower for unrotated in (plain, back)),
        },
        values={
            "row": ROW,
            "far": SHIFTS[-1],
            "turned": turned,
            "still": changes(plain)[-1],
            "moved": changes(turned)[-1],
            "away": [row[AWAY] for row in rows],
        },
    )


def moved(values: str, shift: int, seed: int = SEEDS[0]) -> tuple[float, float]:
    """Returns |out_s - out| / |out| and |out_s - R_s out| / |out|, largest over tokens, for all positions + shift."""
    here, (q, k, v) = torch.arange(TOKENS), normal(3, 1, HEADS, TOKENS, HEAD_DIM, seed=seed)
    before, after = (layer(q, k, v, position, values) for position in (here, here + shift))
    rotated, size = ROTARY.rotate(before, torch.full_like(here, shift)), before.norm(dim=-1).max()
    return tuple(float((after - x).norm(dim=-1).max() / size) for x in (before, rotated))  # type: ignore[return-value]


def layer(q: Tensor, k: Tensor, v: Tensor, position: Tensor, values: str) -> Tensor:
    """Returns causal attention with rotated queries and keys, and values as in `VALUES`."""
    rotary, back = VALUES[values]
    v = rotary.rotate(v, position) if rotary.values else v
    out = attend(rotary.rotate(q, position), rotary.rotate(k, position), v, Causal(), backend="dense")
    return rotary.rotate(out, -position) if back else out


def draw_changes(axes: Axes, report: Report) -> None:
    """Draws the change of the output against the shift of positions."""
    for row in report.rows:
        axes.loglog(SHIFTS, changes(row), "o-", label=row["values"], alpha=0.8)
    x, y = "all positions moved by s", "|out(s) - out| / |out|"
    label_axes(axes, "change of the output", x, y, {"title": "values"}, ylim=(1e-17, 1e3))


draw = panels(draw_changes, named("values", AWAY))
