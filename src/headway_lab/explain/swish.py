"""Swish between its two ends. (Ramachandran et al. 2017; SwiGLU: Shazeer 2020.)"""

import torch

from headway.draw import GREY, INK
from headway.nn import ACTIVATIONS, swish
from headway_lab.explain.report import Figure, Report, Rows, label_axes, panels

BETAS = (0.0, 0.1, 1.0, 10.0, 100.0)
LOW, HIGH, COUNT = -6.0, 6.0, 1201
POINTS = (-1.0, 2.0)


def run() -> Report:
    """Values, the lowest point and the distances from x / 2, x, SiLU and ReLU on -6..6, for five beta."""
    x = torch.linspace(LOW, HIGH, COUNT, dtype=torch.float64)
    rows = []
    for beta in BETAS:
        y = swish(x, beta)
        lowest = int(y.argmin())
        ends = {"x/2": x / 2, "x": x, "SiLU": ACTIVATIONS["silu"](x), "ReLU": ACTIVATIONS["relu"](x)}
        rows.append(
            {
                "beta": beta,
                **{f"Swish({p:g})": float(swish(torch.tensor(p, dtype=x.dtype), beta)) for p in POINTS},
                "lowest at x": float(x[lowest]),
                "lowest": float(y[lowest]),
                "falls and rises": bool((y.diff() < 0).any()) and bool((y.diff() > 0).any()),
                **{f"from {name}": float((y - end).abs().max()) for name, end in ends.items()},
            }
        )
    return judge(rows)


def judge(rows: Rows) -> Report:
    """The verdict: x / 2 at one end, SiLU at 1, ReLU at the other."""
    zero, one, most = rows[0], rows[BETAS.index(1.0)], rows[-1]
    return Report(
        rows=tuple(rows),
        claims={
            "at beta = 0 it is x / 2": zero["from x/2"] < 1e-12,
            "and not x": zero["from x"] > 1,
            "at 1 it is SiLU, which falls and rises": one["from SiLU"] < 1e-12 and one["falls and rises"],
            "it comes within 0.3 / beta of ReLU": all(
                row["from ReLU"] < 0.3 / row["beta"] for row in rows if row["beta"]
            ),
        },
        setting=f"x = {LOW:g}..{HIGH:g}, {COUNT} points, float64; nothing random",
        finding=(
            f"at beta = 0 it is x / 2 (Swish(2) = {zero['Swish(2)']:g}) and {zero['from x']:g} away from x; at 1 it is "
            f"SiLU, lowest at x = {one['lowest at x']:.2f} with {one['lowest']:.4f}; at {most['beta']:g} it is within "
            f"{most['from ReLU']:.4f} of ReLU (Swish(-1) = {most['Swish(-1)']:.1e})"
        ),
    )


def draw(figure: Figure, report: Report) -> None:
    """Left: the curves. Right: near 0, where SiLU dips."""
    left, right = panels(figure, 9.5, 4)
    for axes, low, high in ((left, -4.0, 4.0), (right, -4.0, 1.0)):
        line = torch.linspace(low, high, 801, dtype=torch.float64)
        axes.plot(line, line, ":", color=GREY, linewidth=1.2, label="x (not a limit)")
        axes.plot(line, ACTIVATIONS["relu"](line), "--", color=INK, linewidth=1.0, zorder=3, label="ReLU")
        for beta in BETAS:
            axes.plot(line, swish(line, beta), label=f"β = {beta:g}", linewidth=1.4)
    label_axes(left, "x · sigmoid(β x)", "x", "Swish(x)", {"fontsize": 9})
    label_axes(right, "the dip of β = 1", "x", "Swish(x)", ylim=(-0.6, 0.4))
    one = report.rows[BETAS.index(1.0)]
    x, y = one["lowest at x"], one["lowest"]
    right.plot([x], [y], "o", color=INK, markersize=5)
    right.annotate(f"({x:.2f}, {y:.3f})", (x, y), (x - 1.4, y - 0.12), fontsize=9)
