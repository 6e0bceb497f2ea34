"""Other rotary frequencies, and turned values, trained at equal budgets on text.

(Su et al. 2021: that almost any smooth monotone choice would do, that equal frequencies would not, and that queries
and keys alone are turned.)
"""

from collections.abc import Mapping, Sequence
from typing import Any

from headway.positions import NoPositions, PositionScheme, Rotary
from headway_lab.explain import TOPICS, Report
from headway_lab.explain.runs import Budget, Run, columns, contend, draw_losses, gap_in, rows, small, told

BUDGET, PAIRS = Budget(seeds=(0, 1, 2)), 8
FALLING, EQUAL = ("linear", "quadratic", "cosine"), ("equal to 1", "equal to 1/base")

FORMULA = """x = 2i/d: powers 10000^-x, linear 1 - x, quadratic (1 - x)^2, cosine (1 + cos(pi x)) / 2, equal 1 or 1/base
values turned: out_m = sum_n p_mn R_n v_n, which depends on absolute positions (see rotary-values)"""


def schemes() -> dict[str, PositionScheme]:
    """One switch: the frequencies, or the values."""
    return {
        "powers": Rotary(pairing="halves"),
        "linear": Rotary(pairing="halves", schedule="linear"),
        "quadratic": Rotary(pairing="halves", schedule="quadratic"),
        "cosine": Rotary(pairing="halves", schedule="cosine"),
        "equal to 1": Rotary(pairing="halves", schedule="equal"),
        "equal to 1/base": Rotary(pairing="halves", schedule=(1e-4,) * PAIRS),
        "powers, values too": Rotary(pairing="halves", values=True),
        "none": NoPositions(),
    }


def run() -> Report:
    """Every choice, trained; each against powers."""
    return judge(contend({name: small(positions=scheme) for name, scheme in schemes().items()}, BUDGET))


def judge(runs: Mapping[str, Sequence[Run]]) -> Report:
    """The verdict: whether equal frequencies end higher than powers, whatever the falling schedules do."""
    lines = rows(runs, {name: "powers" for name in runs if name != "powers"})
    apart = {line[0]: gap_in(line) for line in lines[1:]}
    claims = {
        "equal frequencies end higher than powers": all(apart[name].higher for name in EQUAL),
        "some other falling schedule differs from powers": any(apart[name].seen for name in FALLING),
        "turned values end higher": apart["powers, values too"].higher,
    }
    ranking = sorted(lines, key=lambda line: float(line[2]))
    return Report(
        topic="rotary-switches",
        question=TOPICS["rotary-switches"][1],
        formula=FORMULA,
        columns=columns(BUDGET),
        rows=tuple(lines),
        seen=claims["equal frequencies end higher than powers"],
        setting=f"2 layers of width 64, {PAIRS} pairs a head, {BUDGET}",
        finding=(
            f"{told(claims)}. From least loss: {', '.join(f'{line[0]} {line[2]:.3f}' for line in ranking)}. Against "
            "powers: " + "; ".join(f"{name} {x}" for name, x in apart.items())
        ),
    )


def draw(figure: Any, report: Report) -> None:
    """Losses of every choice and seed."""
    figure.set_size_inches(8, 3.8)
    axes = figure.subplots()
    draw_losses(axes, report.rows, len(BUDGET.seeds))
    axes.set_title("rotary: which frequencies, and whether values turn")
