"""How far rounding breaks rotary's invariance to a shift of all positions.

(Su et al. 2021, equation 16: exact in real numbers.)
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headway.positions import Rotary, RotaryTable
from headway_lab.draw import BLUE, GREEN, ORANGE, VIOLET
from headway_lab.explain.figures import Axes, label_axes, panels
from headway_lab.explain.report import Report, Row, Rows
from headway_lab.profiling import power

LAYERS, TOKENS, HEADS, HEAD_DIM, SEEDS = 4, 48, 2, 64, (0, 1, 2)
SHIFTS = (1, 10, 100, 1000, 10_000, 100_000)
ROUNDING = 50  # in eps: each of 4 layers rounds sums of 128 products a few times
ROTARY = Rotary(pairing="adjacent")

DTYPES = ("float64", "float32", "bfloat16", "float16")
# The dtypes of numbers and of angles: float64 (exact) angles, and angles in the dtype of the numbers.
CASES = [(name, angles) for name in DTYPES for angles in dict.fromkeys(("float64", name))]


def run(*, seeds: Sequence[int] = SEEDS) -> Iterator[Row]:
    """Yields the largest change of a small stack's output when all positions shift, by dtype of the numbers and of the
    angles, over the seeds.

    A change is None if a position is beyond the dtype's range, and so the output is not finite.
    """
    here = torch.arange(TOKENS)
    for name, angles in CASES:
        dtype = getattr(torch, name)
        moved = [0.0] * len(SHIFTS)
        for seed in seeds:
            before = stack(here, dtype, angles, seed)
            differences = [stack(here + s, dtype, angles, seed) - before for s in SHIFTS]
            changes = [float(x.abs().max() / before.abs().max()) for x in differences]
            moved = [max(pair, key=lambda x: (math.isnan(x), x)) for pair in zip(moved, changes, strict=True)]
        change = {f"s = {s}": x if math.isfinite(x) else None for s, x in zip(SHIFTS, moved, strict=True)}
        yield {"numbers": name, "angles": angles, "eps": torch.finfo(dtype).eps, **change}


def judge(rows: Rows) -> Report:
    """Returns the verdict: with exact angles the change is rounding at every shift, with half-precision ones it is
    not."""
    exact = [row for row in rows if row["angles"] == "float64"]
    half = [row for row in rows if row["angles"] in ("bfloat16", "float16")]
    column = "s = 1000"
    most_eps = max(row[f"s = {s}"] / row["eps"] for row in exact[1:] for s in SHIFTS)
    (single,) = (row for row in rows if row["angles"] == "float32")
    far = SHIFTS[SHIFTS.index(1000) :]
    growth = power(far, [single[f"s = {s}"] for s in far])
    return Report(
        rows=tuple(rows),
        claims={
            "exact": most_eps < ROUNDING,
            "half": all(
                row[column] > 5 * exact_row[column] for row, exact_row in zip(half, exact[2:], strict=True)
            ),
            "growth": abs(growth - 1) < 0.3,
        },
        values={
            "near": far[0],
            "far": far[-1],
            "exact": {row["numbers"]: row[column] for row in exact},
            "most": most_eps,
            "half": {row["numbers"]: row[column] for row in half},
            "growth": growth,
        },
    )


def stack(position: Tensor, dtype: torch.dtype, angles: str, seed: int = SEEDS[0]) -> Tensor:
    """Returns float64 [T, H D]: x + attention(x) repeated, with every result rounded to `dtype`, and angles kept in
    `angles`."""
    noise = torch.Generator().manual_seed(seed)
    width = HEADS * HEAD_DIM
    x = torch.randn(1, TOKENS, width, generator=noise, dtype=torch.float64).to(dtype)
    weights = torch.randn(LAYERS, 4, width, width, generator=noise, dtype=torch.float64) * width**-0.5
    turn = table(position, dtype, angles)
    future = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    for to_q, to_k, to_v, to_out in weights.to(dtype):
        q, k, v = (product(x, w).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (to_q, to_k, to_v))
        scores = product(turn.apply(q), turn.apply(k).mT) * HEAD_DIM**-0.5
        out = product(scores.masked_fill(future, -torch.inf).softmax(-1), v)
        x = x + product(out.transpose(1, 2).flatten(2), to_out)
    return x[0].double()


def product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b, summed in float32 or better and rounded once to their dtype, as accelerators do.

    `attend` refuses float16 on a CPU, where it is slow; these are a few thousand numbers."""
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    return (a.to(wide) @ b.to(wide)).to(a.dtype)


def table(position: Tensor, dtype: torch.dtype, angles: str) -> RotaryTable:
    """Returns cosines and sines of angles that were computed and kept in that dtype; "float64" is what `Rotary`
    does."""
    if angles == "float64":
        return ROTARY.rotation(position, HEAD_DIM, dtype=dtype)
    angle_dtype: torch.dtype = getattr(torch, angles)
    angle = position.to(angle_dtype)[:, None] * ROTARY.frequencies(HEAD_DIM).to(angle_dtype)
    return RotaryTable.of(angle.cos().float(), angle.sin().float(), "adjacent", HEAD_DIM)


def draw_changes(axes: Axes, report: Report) -> None:
    """Draws the change against the shift: one line for each dtype of numbers and of angles."""
    for row in report.rows:
        exact, colour = row["angles"] == "float64", COLOURS[row["numbers"]]
        name = f"{row['numbers']}, angles {'exact' if exact else 'in ' + row['angles']}"
        axes.loglog(
            SHIFTS, [row[f"s = {s}"] for s in SHIFTS], "o-" if exact else "s--", color=colour, label=name
        )
        if exact:
            axes.axhline(row["eps"], color=colour, linewidth=0.8, linestyle=":")
    legend = {"fontsize": 8, "loc": "center left", "bbox_to_anchor": (1, 0.5)}
    y = "largest change / largest output\n(dotted: eps)"
    label_axes(axes, "all positions moved by s", "s", y, legend)


COLOURS = dict(zip(DTYPES, (VIOLET, BLUE, ORANGE, GREEN), strict=True))
draw = panels(draw_changes)
