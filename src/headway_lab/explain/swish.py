"""Swish between its two limits. (Ramachandran et al. 2017; SwiGLU: Shazeer 2020.)"""

from collections.abc import Iterator
from typing import Any

import torch

from headway.nn import ACTIVATIONS
from headway.nn.feedforward import swish
from headway_lab.draw import GREY, INK
from headway_lab.explain.figures import Axes, Panel, label_axes, panels
from headway_lab.explain.report import Report, Row, Rows

BETAS = (0.0, 0.1, 1.0, 10.0, 100.0)
LOW, HIGH, COUNT = -6.0, 6.0, 1201
POINTS = (-1.0, 2.0)


def run() -> Iterator[Row]:
    """Yields, for five beta, values, the lowest point and the distances from x / 2, x, SiLU and ReLU on -6..6."""
    x = torch.linspace(LOW, HIGH, COUNT, dtype=torch.float64)
    for beta in BETAS:
        y = swish(x, beta)
        lowest = int(y.argmin())
        ends = {"x/2": x / 2, "x": x, "SiLU": ACTIVATIONS["silu"](x), "ReLU": ACTIVATIONS["relu"](x)}
        yield {
            "beta": beta,
            **{f"Swish({p:g})": float(swish(torch.tensor(p, dtype=x.dtype), beta)) for p in POINTS},
            "lowest at x": float(x[lowest]),
            "lowest": float(y[lowest]),
            "falls and rises": bool((y.diff() < 0).any()) and bool((y.diff() > 0).any()),
            **{f"from {name}": float((y - end).abs().max()) for name, end in ends.items()},
        }


def judge(rows: Rows) -> Report:
    """Returns the verdict: x / 2 at one end, SiLU at 1, ReLU at the other."""
    zero, at_1 = rows[0], rows[BETAS.index(1.0)]
    return Report(
        rows=tuple(rows),
        claims={
            "line": zero["from x/2"] < 1e-12,
            "not x": zero["from x"] > 1,
            "SiLU": at_1["from SiLU"] < 1e-12 and at_1["falls and rises"],
            "ReLU": all(row["from ReLU"] < 0.3 / row["beta"] for row in rows if row["beta"]),
        },
        values={"one": at_1},
    )


def shape(title: str, low: float, high: float, **properties: Any) -> Panel:
    """Returns a panel with the curves of all beta, ReLU, and x, from `low` to `high`."""

    def draw(axes: Axes, report: Report) -> None:
        line = torch.linspace(low, high, 801, dtype=torch.float64)
        axes.plot(line, line, ":", color=GREY, linewidth=1.2, label="x (not a limit)")
        axes.plot(line, ACTIVATIONS["relu"](line), "--", color=INK, linewidth=1.0, zorder=3, label="ReLU")
        for beta in BETAS:
            axes.plot(line, swish(line, beta), label=f"β = {beta:g}", linewidth=1.4)
        label_axes(axes, title, "x", "Swish(x)", **properties)

    return draw


draw = panels(
    shape("x · sigmoid(β x)", -4, 4, legend={"fontsize": 9}),
    shape("the dip of β = 1", -4, 1, ylim=(-0.6, 0.4)),
)
