"""The axes that BatchNorm, LayerNorm and RMSNorm average over.

(Ioffe and Szegedy 2015, algorithm 1; Ba et al. 2016, equation 3; Zhang and Sennrich 2019, equation 4.)
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headway.nn import LayerNorm, RMSNorm
from headway_lab.draw import BLUE, GREY, PALE
from headway_lab.explain.figures import Axes, Panel, bars, panels
from headway_lab.explain.report import Report, Row, Rows
from headway_lab.profiling import normal

ROWS, TOKENS, WIDTH, SEEDS = 6, 10, 32, (0, 1, 2)
EPS = 1e-12  # small, so that the invariances are visible
EQUAL, APART = 1e-9, 0.05


def run(*, seeds: Sequence[int] = SEEDS) -> Iterator[Row]:
    """Yields, for each norm in training mode on random numbers, means, variances, and what one row's output depends
    on."""
    for name in NORMS:
        runs = [measure(name, seed) for seed in seeds]
        yield {"norm": name, **{column: max(run[column] for run in runs) for column in runs[0]}}


NORMS: dict[str, Any] = {"BatchNorm": nn.BatchNorm1d, "LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def measure(name: str, seed: int) -> dict[str, float]:
    """Returns the largest |mean| and |variance - 1| over a token's features and over a feature's tokens; then the
    largest change of row 0 when the other rows change, when x is scaled by 10, and when 1 is added to it."""
    spread, mean = (torch.linspace(a, b, WIDTH, dtype=torch.float64) for a, b in ((0.5, 3), (-1, 2)))
    x = normal(ROWS, TOKENS, WIDTH, seed=seed) * spread + mean
    changes = {"other rows": torch.cat((x[:1], 3 * x[1:] + 1)), "10 x": 10 * x, "x + 1": x + 1}
    norm = NORMS[name](WIDTH, eps=EPS).double().train()

    def normed(x: Tensor) -> Tensor:
        y: Tensor = norm(x.flatten(0, 1)).view_as(x)
        return y

    with torch.no_grad():
        y = normed(x)
        columns = {}
        for over, axes in (("features", (2,)), ("batch", (0, 1))):
            columns[f"|mean|, {over}"] = float(y.mean(axes).abs().max())
            columns[f"|var - 1|, {over}"] = float((y.var(axes, unbiased=False) - 1).abs().max())
        for change, z in changes.items():
            columns[f"change: {change}"] = float((normed(z)[0] - y[0]).abs().max())
    return columns


def judge(rows: Rows) -> Report:
    """Returns the verdict: each is normalized over its own axes, and only BatchNorm's rows depend on one another."""
    batch, layer, _ = rows

    def moments(row: Row, over: str) -> tuple[float, float]:
        return row[f"|mean|, {over}"], row[f"|var - 1|, {over}"]

    largest = max(*moments(batch, "batch"), *moments(layer, "features"))
    other_axes = min(*moments(batch, "features"), *moments(layer, "batch"))
    mixed, rescaled, moved = (
        [row[f"change: {change}"] for row in rows] for change in ("other rows", "10 x", "x + 1")
    )
    return Report(
        rows=tuple(rows),
        claims={
            "own": largest < EQUAL,
            "other": other_axes > APART,
            "mixed": mixed[0] > APART and max(mixed[1:]) == 0,
            "rescaled": max(rescaled) < EQUAL,
            "moved": max(moved[:2]) < EQUAL < moved[2],
        },
        values={"own": largest, "mixed": mixed, "moved": moved[2]},
    )


def cube(name: str, over: str) -> Panel:
    """Returns a panel with B x T x M numbers as boxes; those that one mean is taken over are blue."""

    def draw(axes: Axes, report: Report) -> None:
        colours = np.full((5, 5, 5), PALE)
        colours[(slice(None), slice(None), -1) if name == "BatchNorm" else (-1, 0)] = (
            BLUE  # one feature, or one token
        )
        axes.voxels(np.ones((5, 5, 5)), facecolors=colours, edgecolor=GREY, linewidth=0.3, shade=False)
        axes.set_title(f"{name}: over {over}", fontsize=10)
        for which, label in zip("xyz", ("row", "token", "feature"), strict=True):
            axes.set(**{f"{which}label": label, f"{which}ticks": []})
        axes.set_box_aspect((1, 1, 1), zoom=0.9)

    return draw


CUBES = (("BatchNorm", "batch and tokens"), ("LayerNorm", "features"), ("RMSNorm", "features, no mean"))
CHANGED = ("other rows", "10 x", "x + 1")
draw = panels(
    *(cube(*case) for case in CUBES),
    *(bars(("norm",), f"change: {x}", x, "row 0 moves by", xscale="log", xlim=(1e-17, 100)) for x in CHANGED),
    layout="ABC;DEF",
    per_subplot_kw={"ABC": {"projection": "3d"}},
)
