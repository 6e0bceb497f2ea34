"""The effect of the choice of rotary frequencies: decay, what scores can express, and what can be learned.

(Su et al. 2021, section 3.3; its author states that almost any smooth monotone choice decays.)
"""

from collections.abc import Iterator, Sequence
from statistics import fmean

import torch
from torch import Tensor

from headway.positions import Rotary, Schedule
from headway_lab.explain.figures import Axes, label_axes, panels
from headway_lab.explain.offset_task import OFFSET, SEEDS, STEPS, SYMBOLS, TOKENS, WIDTH, named, train
from headway_lab.explain.report import Report, Row, Rows, by_seed
from headway_lab.explain.rotary_decay import decay
from headway_lab.explain.spread import every, gap
from headway_lab.profiling import normal

HEAD_DIM, FARTHEST, CURVES = 128, 256, 512
SHOWN = (0, 10, 50, 100, 256)


def schedules(head_dim: int) -> dict[str, Rotary]:
    """Returns the named schedules, and one that a reader asked for: all frequencies equal to 1/base."""
    names: tuple[Schedule, ...] = ("powers", "linear", "quadratic", "cosine", "equal")
    named = {str(name): Rotary(pairing="adjacent", schedule=name) for name in names}
    return {**named, "equal, 1/base": Rotary(pairing="adjacent", schedule=(1e-4,) * (head_dim // 2))}


def run(*, seeds: Sequence[int] = SEEDS, steps: int = STEPS) -> Iterator[Row]:
    """Yields f(m) of every schedule at d = 128, the rank of its score curves, and the accuracy of layers trained with
    it."""
    for (name, rotary), short in zip(schedules(HEAD_DIM).items(), schedules(WIDTH).values(), strict=True):
        frequencies = rotary.frequencies(HEAD_DIM)
        guessed = [train(short, (OFFSET,), steps=steps, seed=seed).accuracy() for seed in seeds]
        yield {
            "frequencies": name,
            **{f"f({m})": float(decay(torch.tensor(m), frequencies)) for m in SHOWN},
            "independent curves": rank(frequencies),
            "right, mean": fmean(guessed),
            **{f"seed {seed}": share for seed, share in zip(seeds, guessed, strict=True)},
        }


def rank(frequencies: Tensor) -> int:
    """Returns the number of independent curves score(m), m = 0..256, of random queries and keys (to 1e-6 of the
    largest)."""
    h = normal(CURVES, HEAD_DIM // 2, 2, seed=SEEDS[0])
    angle = torch.arange(FARTHEST + 1, dtype=torch.float64)[:, None] * frequencies
    curves = h[..., 0] @ angle.cos().T - h[..., 1] @ angle.sin().T
    return int(torch.linalg.matrix_rank(curves, rtol=1e-6))


def judge(rows: Rows) -> Report:
    """Returns the verdict: different frequencies decay and are learned, a single one does neither."""
    varied, equal = rows[:-2], rows[-2:]
    fall = min(row["f(0)"] / row[f"f({SHOWN[-1]})"] for row in varied)
    flat = all(abs(row[f"f({m})"] - row["f(0)"]) < 1e-9 for row in equal for m in SHOWN)
    (ranks, same), (accuracies, equal_accuracies) = (
        [[row[name] for row in group] for group in (varied, equal)]
        for name in ("independent curves", "right, mean")
    )
    return Report(
        rows=tuple(rows),
        claims={
            "fall": fall > 2,
            "flat": flat,
            "same": set(same) == {2},
            "more": min(ranks) > 2,
            "learned": every(
                gap(by_seed(row), by_seed(varied_row)).lower for row in equal for varied_row in varied
            ),
        },
        values={
            "tokens": TOKENS,
            "varied": len(varied),
            "fall": fall,
            "same": same[0],
            "least": min(ranks),
            "most": max(ranks),
            "right": min(accuracies),
            "wrong": equal_accuracies,
            "chance": 1 / SYMBOLS,
        },
    )


def draw_decay(axes: Axes, report: Report) -> None:
    """Draws f(m) of every schedule, at every distance."""
    m = torch.arange(FARTHEST + 1)
    for name, rotary in schedules(HEAD_DIM).items():
        axes.plot(m, decay(m, rotary.frequencies(HEAD_DIM)), label=name, linewidth=1.3)
    label_axes(axes, "upper trend of products", "distance m", "f(m)", {"fontsize": 8}, ylim=(0, None))


draw = panels(
    draw_decay, named("frequencies", "right, mean", lambda row: row["frequencies"].startswith("equal"))
)
