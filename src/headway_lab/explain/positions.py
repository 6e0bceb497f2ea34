"""Ways to mark positions over one switch, trained at equal budgets. (Su et al. 2021, section 2, names them.)"""

from collections.abc import Mapping, Sequence
from typing import Any

from headway.positions import (
    Learned,
    LinearBias,
    NoPositions,
    PositionScheme,
    Relative,
    Rotary,
    Sinusoidal,
    T5Bias,
)
from headway_lab.explain import TOPICS, Report
from headway_lab.explain.runs import Budget, Run, columns, contend, draw_losses, gap_in, rows, small, told

BUDGET = Budget()
ABSOLUTE, RELATIVE = ("sinusoidal", "learned"), ("relative", "T5 bias", "ALiBi")

FORMULA = """rotary      (R_m q) . (R_n k)                     sinusoidal  x + PE(m), fixed
relative    q . (k + a[clip(n - m)])              learned     x + E[m]
T5 bias     q . k + b[bucket(n - m)]              none        q . k: the causal mask alone tells of places
ALiBi       q . k - slope (m - n)
one switch: everything else, data and their order included, is the same for a seed
seen        the mean gap, seed by seed, is beyond t s / sqrt(n) (95 %, Student's t)"""


def schemes(tokens: int) -> dict[str, PositionScheme]:
    """Contenders for rows of `tokens`."""
    return {
        "rotary": Rotary(pairing="halves"),
        "relative": Relative(16),
        "T5 bias": T5Bias(max_distance=tokens),
        "ALiBi": LinearBias(),
        "sinusoidal": Sinusoidal(),
        "learned": Learned(tokens),
        "none": NoPositions(),
    }


def run() -> Report:
    """Every scheme, trained; each against rotary."""
    specs = {name: small(positions=scheme) for name, scheme in schemes(BUDGET.tokens).items()}
    return judge(contend(specs, BUDGET))


def judge(runs: Mapping[str, Sequence[Run]]) -> Report:
    """The verdict: rotary ends below what marks embeddings, and below nothing at all."""
    lines = rows(runs, {name: "rotary" for name in runs if name != "rotary"})
    apart = {line[0]: gap_in(line) for line in lines[1:]}
    claims = {
        "rotary ends below what is added to embeddings": all(apart[name].higher for name in ABSOLUTE),
        "and below no positions": apart["none"].higher,
    }
    return Report(
        topic="positions",
        question=TOPICS["positions"][1],
        formula=FORMULA,
        columns=columns(BUDGET),
        rows=tuple(lines),
        seen=all(claims.values()),
        setting=f"2 layers of width 64, {BUDGET}",
        finding=(
            f"{told(claims)}. Against rotary: "
            + "; ".join(f"{name} {apart[name]}" for name in (*RELATIVE, *ABSOLUTE, "none"))
        ),
    )


def draw(figure: Any, report: Report) -> None:
    """Losses of every scheme and seed."""
    figure.set_size_inches(8, 3.6)
    axes = figure.subplots()
    draw_losses(axes, report.rows, len(BUDGET.seeds))
    axes.set_title("one switch, equal budgets: how positions are marked")
