"""What the two terms of a rotated product mean. (Su et al. 2021, equation 12, written out in real numbers.)"""

import math
import random
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from headway.positions import Rotary
from headway_lab.explain.figures import curves, panels
from headway_lab.explain.report import Report, Row, Rows

FARTHEST = 12
_NOISE = random.Random(0)
CASE = tuple(_NOISE.gauss(0, 1) for _ in range(4))  # q1, q2, k1, k2
ROTARY = Rotary(pairing="adjacent")
ALLOWED = 1e-12
EVEN = "q = [1/2, 1/2], k = [1, 1]"  # its score is even in D


def run() -> Iterator[Row]:
    """Yields the score of one q and k by `Rotary`, by the expansion and by the printed one, for D = -12..12."""
    q, k = torch.tensor(CASE, dtype=torch.float64).view(2, 2)
    halves = torch.full((2,), 0.5, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    for d in range(-FARTHEST, FARTHEST + 1):
        correct, printed = expansion(q, k, d)
        yield {
            "D = m - n": d,
            "score": score(q, k, d),
            "sin(m - n)": correct,
            "sin(n - m), printed": printed,
            EVEN: score(*halves, d),
        }


def score(q: Tensor, k: Tensor, distance: int) -> float:
    """Returns (R_m q) . (R_n k) for one pair and m - n = distance."""
    rotated = ROTARY.rotate(torch.stack((q, k))[None, None], torch.tensor([distance, 0]))
    return float(rotated[0, 0, 0] @ rotated[0, 0, 1])


def expansion(q: Tensor, k: Tensor, distance: float) -> tuple[float, float]:
    """Returns cos(D) q.k + sin(D) (q1 k2 - q2 k1), and the same with the printed sign of D in the sine."""
    dot, cross = float(q @ k), float(q[0] * k[1] - q[1] * k[0])
    first = math.cos(distance) * dot
    return first + math.sin(distance) * cross, first + math.sin(-distance) * cross


def judge(rows: Rows) -> Report:
    """Returns the verdict: sin(m - n) is the right sign, and the score without the cross term rises again."""
    error = max(abs(row["score"] - row["sin(m - n)"]) for row in rows)
    printed_error = max(abs(row["score"] - row["sin(n - m), printed"]) for row in rows)
    alone = [row[EVEN] for row in rows if row["D = m - n"] >= 0]
    rises = sum(b > a for a, b in pairwise(alone))
    uneven, even = (
        max(abs(row[name] - mirrored[name]) for row, mirrored in zip(rows, rows[::-1], strict=True))
        for name in ("score", EVEN)
    )
    return Report(
        rows=tuple(rows),
        claims={
            "right": error <= ALLOWED,
            "printed": printed_error > 1e-3,
            "uneven": uneven > 1e-3,
            "even": even <= ALLOWED and rises > 0,
        },
        values={
            "off": error,
            "wrong": printed_error,
            "uneven": uneven,
            "rises": rises,
            "steps": len(alone) - 1,
            "there": next(row for row in rows if row["D = m - n"] == 3),
        },
        highlight=tuple(i for i, row in enumerate(rows) if abs(row["D = m - n"]) <= 6),
    )


SIGNS = {"sin(m - n)": "- blue", "sin(n - m), printed": "-- orange", "score": "o ink"}
draw = panels(
    curves("D = m - n", SIGNS, "one pair: score against distance"),
    curves("D = m - n", {EVEN: "o- blue"}, "without the second term", legend=None),
)
