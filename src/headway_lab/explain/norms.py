"""What BatchNorm, LayerNorm and RMSNorm average over.

(Ioffe and Szegedy 2015, algorithm 1; Ba et al. 2016, equation 3; Zhang and Sennrich 2019, equation 4.)
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.colors import ListedColormap
from torch import Tensor, nn

from headway.draw import BLUE, GREY, INK, PALE
from headway.nn import LayerNorm, RMSNorm
from headway_lab.explain.report import Axes, Figure, Report, Row, Rows, bare, label_axes
from headway_lab.profiling import normal

ROWS, TOKENS, WIDTH, SEEDS = 6, 10, 32, (0, 1, 2)
EPS = 1e-12  # small, so that the invariances are seen
EQUAL, APART = 1e-9, 0.05


def run(*, seeds: Sequence[int] = SEEDS) -> Report:
    """Each norm in training mode on random numbers: means, variances, and what one row's output depends on."""
    rows = []
    for name in NORMS:
        runs = [measure(name, seed) for seed in seeds]
        rows.append({"norm": name, **{column: max(run[column] for run in runs) for column in runs[0]}})
    return judge(rows, seeds)


class BatchNorm(nn.BatchNorm1d):
    """torch's, on [B, T, M]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


NORMS: dict[str, Any] = {"BatchNorm": BatchNorm, "LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def measure(name: str, seed: int) -> dict[str, float]:
    """Largest |mean| and |variance - 1| over a token's features and over a feature's tokens; then the largest change
    of row 0 when the other rows change, when x is scaled by 10, and when 1 is added to it."""
    spread, mean = (torch.linspace(a, b, WIDTH, dtype=torch.float64) for a, b in ((0.5, 3), (-1, 2)))
    x = normal(ROWS, TOKENS, WIDTH, seed=seed) * spread + mean
    changes = {"other rows": torch.cat((x[:1], 3 * x[1:] + 1)), "10 x": 10 * x, "x + 1": x + 1}
    norm = NORMS[name](WIDTH, eps=EPS).double().train()
    with torch.no_grad():
        y = norm(x)
        found = {}
        for over, axes in (("features", (2,)), ("batch", (0, 1))):
            found[f"|mean|, {over}"] = float(y.mean(axes).abs().max())
            found[f"|var - 1|, {over}"] = float((y.var(axes, unbiased=False) - 1).abs().max())
        for change, z in changes.items():
            found[f"change: {change}"] = float((norm(z)[0] - y[0]).abs().max())
    return found


def judge(rows: Rows, seeds: Sequence[int] = SEEDS) -> Report:
    """The verdict: each is normal over its own axes, and only BatchNorm's rows depend on one another."""
    batch, layer, _ = rows

    def moments(row: Row, over: str) -> tuple[float, float]:
        return row[f"|mean|, {over}"], row[f"|var - 1|, {over}"]

    own = max(*moments(batch, "batch"), *moments(layer, "features"))
    apart = min(*moments(batch, "features"), *moments(layer, "batch"))
    mixed, rescaled, moved = (
        [row[f"change: {what}"] for row in rows] for what in ("other rows", "10 x", "x + 1")
    )
    return Report(
        rows=tuple(rows),
        claims={
            "BatchNorm has mean 0 and variance 1 over the batch, LayerNorm over the features": own < EQUAL,
            "neither over the other axes": apart > APART,
            "only BatchNorm's rows depend on one another": mixed[0] > APART and max(mixed[1:]) == 0,
            "all ignore a factor": max(rescaled) < EQUAL,
            "RMSNorm alone notices an added constant": max(moved[:2]) < EQUAL < moved[2],
        },
        setting=f"{ROWS} rows x {TOKENS} tokens x {WIDTH} features, float64, training mode, seeds {tuple(seeds)}",
        finding=(
            f"BatchNorm has mean 0 and variance 1 over the batch for each feature, LayerNorm over the features of "
            f"each token (both to {own:.0e}), and neither over the other axes. When the other rows change, a row "
            f"changes by up to {mixed[0]:.1f} under BatchNorm and by exactly {mixed[1]:g} under the other two. All "
            f"ignore a factor; RMSNorm, which takes no mean, notices an added constant (by up to {moved[2]:.1f})"
        ),
    )


def draw(figure: Figure, report: Report) -> None:
    """Above: which numbers share one mean. Below: what each norm's row 0 notices."""
    figure.set_size_inches(10.5, 5.8)
    above, below = figure.subfigures(2, 1, height_ratios=(1.35, 1))
    names = report.column("norm")
    for place, name in enumerate(names, start=1):
        cube(above.add_subplot(1, 3, place, projection="3d"), name)
    changes = {"other rows": "other rows changed", "10 x": "x times 10", "x + 1": "x plus 1"}
    axes = below.subplots()
    found = np.array([[row[f"change: {change}"] for change in changes] for row in report.rows])
    axes.pcolormesh(
        found > EQUAL, cmap=ListedColormap([PALE, BLUE]), vmin=0, vmax=1, edgecolors="white", linewidth=3
    )
    for (row, column), change in np.ndenumerate(found):
        text, colour = ("the same", INK) if change <= EQUAL else (f"moves by {change:.1f}", "white")
        axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=colour, fontsize=9)
    axes.invert_yaxis()
    axes.set_xticks(np.arange(3) + 0.5, list(changes.values()))
    axes.set_yticks(np.arange(3) + 0.5, names)
    label_axes(axes, "what becomes of row 0", f"change of the input (the same: within {EQUAL:g})")
    bare(axes)
    axes.tick_params(labelsize=9)


def cube(axes: Axes, name: str, side: int = 5) -> None:
    """B x T x M numbers as boxes; those that one mean is taken over are blue."""
    colours = np.full((side, side, side), PALE)
    if name == "BatchNorm":
        colours[:, :, -1], over = BLUE, "batch and tokens"  # of one feature
    else:
        colours[-1, 0, :] = BLUE  # of one token
        over = "features" if name == "LayerNorm" else "features, no mean"
    filled = np.ones_like(colours, dtype=bool)
    axes.voxels(filled, facecolors=colours, edgecolor=GREY, linewidth=0.3, shade=False)
    axes.set_title(f"{name}: over {over}", fontsize=10)
    axes.set_xlabel("row", fontsize=8, labelpad=-12)
    axes.set_ylabel("token", fontsize=8, labelpad=-12)
    axes.set_zlabel("feature", fontsize=8, labelpad=-12)
    axes.set(xticks=[], yticks=[], zticks=[])
    axes.set_box_aspect((1, 1, 1), zoom=0.9)
