"""Why values are not turned: what a shift of all positions does to the output. (Su et al. 2021, section 3.2.)"""

from typing import Any

import torch
from torch import Tensor

from headway.attention import attend
from headway.draw import BLUE, GREEN, ORANGE
from headway.patterns import Causal
from headway.positions import Rotary
from headway_lab.explain import TOPICS, Report
from headway_lab.explain.offset_task import TOKENS as ROW
from headway_lab.explain.offset_task import train

TOKENS, HEADS, HEAD_DIM, SHIFTS = 48, 2, 64, (1, 10, 100, 1000)
OFFSET, STEPS, SEEDS = 5, 100, (0, 1, 2)
EQUAL = 1e-12
ROTARY = Rotary(pairing="adjacent")
VALUES = {
    "plain": (ROTARY, False),
    "turned": (Rotary(pairing="adjacent", values=True), False),
    "turned and back": (Rotary(pairing="adjacent", values=True), True),
}

FORMULA = """p_mn depends on n - m only, so moving all positions by s changes
sum_n p_mn v_n                   not at all              relative
sum_n p_mn R_(n+s) v_n         = R_s sum_n p_mn R_n v_n  the whole output is turned by R_s: absolute
R_(m+s)^T sum_n p_mn R_(n+s) v_n = sum_n p_mn R_(n-m) v_n  relative again, and each value says how far it came"""


def run() -> Report:
    """One layer of random queries, keys and values, moved; and three trained layers, moved."""
    rows = []
    for values, (rotary, back) in VALUES.items():
        changed = [moved(values, shift) for shift in SHIFTS]
        trained = [train(rotary, (OFFSET,), back=back, steps=STEPS, seed=seed) for seed in SEEDS]
        there, away = ([t.accuracy(start) for t in trained] for start in (0, SHIFTS[-1]))
        rows.append(
            (
                values,
                *(change for change, _ in changed),
                max(off for _, off in changed),
                sum(there) / len(there),
                sum(away) / len(away),
                min(away),
                max(away),
            )
        )
    return judge(rows)


def judge(rows: list[tuple[Any, ...]]) -> Report:
    """The verdict: only turned values notice the shift, exactly by R_s, and what is learned with them breaks."""
    plain, turned, back = rows
    last, off, there, away = len(SHIFTS), len(SHIFTS) + 1, len(SHIFTS) + 2, len(SHIFTS) + 3
    return Report(
        topic="rotary-values",
        question=TOPICS["rotary-values"][1],
        formula=FORMULA,
        columns=(
            "values",
            *(f"change, s = {s}" for s in SHIFTS),
            "from R_s out",
            "right, s = 0",
            f"right, s = {SHIFTS[-1]}",
            "least",
            "most",
        ),
        rows=tuple(rows),
        seen=(
            max(*plain[1 : last + 1], *back[1 : last + 1]) < EQUAL
            and min(turned[1 : last + 1]) > 0.05
            and turned[off] < EQUAL
            and turned[away] < min(plain[away], back[away])
        ),
        setting=(
            f"{TOKENS} tokens, {HEADS} heads of {HEAD_DIM}, float64; learning: the token {OFFSET} back in rows of "
            f"{ROW}, {STEPS} steps, seeds {SEEDS}"
        ),
        finding=(
            f"moved by {SHIFTS[-1]}, plain values change the output by {plain[last]:.0e} and turned ones by "
            f"{turned[last]:.0%}: the output is R_s times what it was (to {turned[off]:.0e}). A layer with turned "
            f"values learns the task too ({turned[there]:.0%} right) but gets {turned[away]:.0%} right at positions "
            f"moved by {SHIFTS[-1]}, where plain values keep {plain[away]:.0%}: not repetition speaks against it, but "
            f"absolute positions in the output. Turned back at the query, values are relative ({back[away]:.0%})"
        ),
    )


def moved(values: str, shift: int) -> tuple[float, float]:
    """|out_s - out| / |out|, and |out_s - R_s out| / |out|, largest over tokens, for all positions + shift."""
    noise = torch.Generator().manual_seed(SEEDS[0])
    q, k, v = torch.randn(3, 1, HEADS, TOKENS, HEAD_DIM, generator=noise, dtype=torch.float64)
    here = torch.arange(TOKENS)
    before, after = (layer(q, k, v, at, values) for at in (here, here + shift))
    whole = ROTARY.rotate(before, torch.full_like(here, shift))
    size = before.norm(dim=-1).max()
    return tuple(float((after - x).norm(dim=-1).max() / size) for x in (before, whole))  # type: ignore[return-value]


def layer(q: Tensor, k: Tensor, v: Tensor, position: Tensor, values: str) -> Tensor:
    """Causal attention with queries and keys turned, and values as `VALUES` says."""
    rotary, back = VALUES[values]
    v = rotary.rotate(v, position) if rotary.values else v
    out = attend(rotary.rotate(q, position), rotary.rotate(k, position), v, Causal(), backend="dense")
    return rotary.rotate(out, -position) if back else out


def draw(figure: Any, report: Report) -> None:
    """Left: how much the output changes when positions move. Right: what trained layers still get right."""
    figure.set_size_inches(9.5, 3.8)
    left, right = figure.subplots(1, 2)
    colours, marks = (BLUE, ORANGE, GREEN), ("o", "s", "^")
    for row, colour, mark in zip(report.rows, colours, marks, strict=True):
        left.loglog(SHIFTS, row[1 : len(SHIFTS) + 1], mark + "-", color=colour, label=row[0], alpha=0.8)
    left.set(title="change of the output", xlabel="all positions moved by s", ylabel="|out(s) - out| / |out|")
    left.set_ylim(1e-17, 1e3)
    left.legend(title="values", loc="upper left", ncols=3, fontsize=8)
    at = torch.arange(len(report.rows))
    there, away = report.column("right, s = 0"), report.column(f"right, s = {SHIFTS[-1]}")
    least, most = report.column("least"), report.column("most")
    error = [
        [a - b for a, b in zip(away, least, strict=True)],
        [b - a for a, b in zip(away, most, strict=True)],
    ]
    right.bar(at - 0.2, there, 0.38, color="#b9c4d0")
    right.bar(at + 0.2, away, 0.38, color=colours, yerr=error)
    right.set_xticks(at, report.column("values"))
    right.set(title=f"token {OFFSET} back named right", ylabel="share of tokens", ylim=(0, 1.05))
    right.set_xlabel(
        f"values (grey: positions as trained, colour: moved by {SHIFTS[-1]}, line: seeds)", fontsize=9
    )
    right.grid(visible=False, axis="x")
