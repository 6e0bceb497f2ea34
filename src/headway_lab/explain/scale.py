"""Why scores are divided by the square root of the head's width. (Vaswani et al. 2017, section 3.2.1.)"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from headway.attention import attention_weights
from headway_lab.explain.figures import label_ticks
from headway_lab.explain.report import Report, Row

WIDTHS = (4, 8, 16, 32, 64, 128, 256, 512)
SEEDS = (0, 1, 2)
QUERIES, KEYS = 256, 64

FORMULA = """q, k ~ N(0, 1) in d dimensions:  Var(q . k) = d;  Var(q . k / sqrt(d)) = 1
p = softmax(s),  J = dp/ds = diag(p) - p p^T,  |J|^2 = sum p^2 - 2 sum p^3 + (sum p^2)^2
large scores make p one key's alone, and then J, through which every gradient goes, is 0"""


def run() -> Report:
    """Var(q . k) and the median norm of the softmax's Jacobian, with and without the scale, d = 4..512."""
    rows = []
    for width in WIDTHS:
        variance, plain, scaled, alone = [], [], [], []
        for seed in SEEDS:
            q, k = _sample(width, seed)
            variance.append(float((q @ k.transpose(-1, -2)).var()))
            sharp = attention_weights(q, k, scale=1.0)
            plain.append(float(jacobian_norm(sharp).median()))
            scaled.append(float(jacobian_norm(attention_weights(q, k)).median()))
            alone.append(float(sharp.amax(-1).mean()))
        rows.append(
            {
                "d": width,
                "Var(q.k)": fmean(variance),
                "|J| without scale": fmean(plain),
                "|J| with scale": fmean(scaled),
                "largest weight without scale": fmean(alone),
            }
        )
    return judge(rows)


def judge(rows: Sequence[Row]) -> Report:
    """The verdict on the table: the variance follows d, the unscaled Jacobian collapses, the scaled one
    does not."""
    off = max(abs(row["Var(q.k)"] / row["d"] - 1) for row in rows)
    first, last, kept = rows[0], rows[-1], [row["|J| with scale"] for row in rows]
    collapse, keep = first["|J| without scale"] / last["|J| without scale"], max(kept) / min(kept)
    return Report(
        rows=tuple(rows),
        seen=off < 0.1 and collapse > 10 and keep < 1.5,
        setting=f"d = {WIDTHS[0]}..{WIDTHS[-1]}, {QUERIES} queries x {KEYS} keys, {len(SEEDS)} seeds, medians",
        finding=(
            f"Var(q.k) is d within {off:.1%}; from d = {first['d']} to {last['d']} the softmax's gradient falls "
            f"{collapse:.0f}-fold without the scale and stays within a factor of {keep:.2f} with it"
        ),
    )


def jacobian_norm(p: Tensor) -> Tensor:
    """Frobenius norm of diag(p) - p p^T for each row of weights p [.., S]: sum p^2 - 2 sum p^3 + (sum
    p^2)^2."""
    square, cube = p.square().sum(-1), p.pow(3).sum(-1)
    return (square - 2 * cube + square.square()).clamp_min(0).sqrt()


def draw(figure: Any, report: Report) -> None:
    """Left: the variance against d. Right: the Jacobian's norm with and without the scale."""
    figure.set_size_inches(9, 3.8)
    left, right = figure.subplots(1, 2)
    width = report.column("d")
    left.loglog(width, width, "--", color="#8a94a0", linewidth=1.2, label="d")
    left.loglog(width, report.column("Var(q.k)"), "o", label="measured")
    left.set(title="variance of q · k", xlabel="head width d", ylabel="Var(q · k)")
    right.loglog(width, report.column("|J| without scale"), "o-", color="#c8453c", label="softmax(q · k)")
    right.loglog(width, report.column("|J| with scale"), "o-", color="#3c9b6b", label="softmax(q · k / √d)")
    right.set(title="gradient through the softmax", xlabel="head width d", ylabel="median |dp/ds|")
    for axes in (left, right):
        label_ticks(axes, width)
        axes.legend()


def _sample(width: int, seed: int) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    shape = (1, 1, QUERIES + KEYS, width)
    both = torch.randn(shape, generator=noise, dtype=torch.float64)
    return both[:, :, :QUERIES], both[:, :, QUERIES:]
