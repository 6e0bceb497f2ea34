"""Contests: contenders that differ in one switch, trained alike, and claims about their held-out losses."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.models import cost
from headway.positions import (
    Learned,
    LinearBias,
    NoPositions,
    PerLayer,
    PositionScheme,
    Relative,
    Rotary,
    Sinusoidal,
    T5Bias,
)
from headway_lab.draw import BLUE, GREY, ORANGE
from headway_lab.explain.figures import Axes, Figure, Panel, panels
from headway_lab.explain.report import Report, Rows, by_seed
from headway_lab.explain.runs import Budget, Run, Runs, contend, small
from headway_lab.explain.spread import Gap, every, gap


def losses(runs: Sequence[Run]) -> list[float]:
    """Returns the loss of every seed."""
    return [run.loss for run in runs]


def rows(runs: Runs, seeds: Sequence[int], base: str | None = None) -> list[dict[str, Any]]:
    """Returns a row for each contender: mean and standard deviation of its losses, its gap to `base` (or, without one,
    to the contender before it), mean seconds of one core per run, and the losses one by one."""
    table = []
    for name, previous in zip(runs, [None, *runs], strict=False):
        values, reference = losses(runs[name]), base or previous
        difference = None if reference in (None, name) else gap(values, losses(runs[reference]))
        table.append(
            {
                "contender": name,
                "parameters": cost.parameter_count(runs[name][0].model.spec),
                "loss": statistics.fmean(values),
                "spread": statistics.stdev(values),
                "against": difference and reference,
                "gap": difference and difference.mean,
                "bound": difference and difference.bound,
                "seen": difference and difference.seen,
                "seconds": statistics.fmean(run.seconds for run in runs[name]),
                **{f"seed {seed}": loss for seed, loss in zip(seeds, values, strict=True)},
            }
        )
    return table


def gaps(table: Rows) -> dict[str, Gap]:
    """Returns the gaps in the table of `rows`, by contender."""
    return {row["contender"]: Gap(row["gap"], row["bound"]) for row in table if row["against"] is not None}


def draw_losses(title: str) -> Panel:
    """Returns a panel with a bar from the least to the largest loss of each contender, a dot for each seed, and a line
    at the mean; contenders that differ from their reference are orange."""

    def draw(axes: Axes, report: Report) -> None:
        table = [row for row in report.rows if row.get("loss")]
        for height, row in enumerate(table):
            colour = BLUE if row["against"] is None else (ORANGE if row["seen"] else GREY)
            values = by_seed(row)
            axes.plot([min(values), max(values)], [height, height], color=colour, alpha=0.35, linewidth=6)
            axes.plot(values, [height] * len(values), "o", color=colour, markersize=4)
            axes.plot([row["loss"]] * 2, [height - 0.3, height + 0.3], color=colour, linewidth=2)
        axes.set_yticks(range(len(table)), [row["contender"] for row in table])
        axes.invert_yaxis()
        x = "held-out loss (nats per byte); dots: seeds, orange: gap seen, grey: too small to tell"
        axes.set_xlabel(x, fontsize=9)
        axes.set_title(title)
        axes.grid(visible=False, axis="y")

    return draw


Claim = Callable[[Mapping[str, Gap]], bool | None]
USUAL = Budget()


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A topic: ways to mark positions, each compared with the first of them.

    schemes   the contenders
    claims    keys of sentences, and whether the gaps by contender show them
    layers    number of layers of the models
    title     title of the figure
    """

    schemes: Mapping[str, PositionScheme]
    claims: Mapping[str, Claim]
    budget: Budget = USUAL
    layers: int = 2
    title: str

    def run(self, *, seeds: Sequence[int] | None = None, steps: int | None = None) -> Report:
        """Trains every contender with the contest's budget, except for the given seeds and steps."""
        budget = replace(
            self.budget, seeds=tuple(seeds or self.budget.seeds), steps=steps or self.budget.steps
        )
        specs = {name: small(positions=scheme, layers=self.layers) for name, scheme in self.schemes.items()}
        return self.judge(contend(specs, budget), budget)

    def judge(self, runs: Runs, budget: Budget) -> Report:
        """Returns the verdict: which claims hold."""
        base = next(iter(self.schemes))
        table = rows(runs, budget.seeds, base)
        contender_gaps = gaps(table)
        by_loss = sorted((row["loss"], row["contender"]) for row in table)
        return Report(
            rows=tuple(table),
            claims={claim: holds(contender_gaps) for claim, holds in self.claims.items()},
            values={
                "layers": self.layers,
                "budget": budget,
                "base": base,
                "ranking": {name: loss for loss, name in by_loss},
                "apart": contender_gaps,
            },
        )

    def draw(self, figure: Figure, report: Report) -> None:
        """Draws the losses of every contender and seed."""
        panels(draw_losses(self.title))(figure, report)


ROTARY, NONE = Rotary(pairing="halves"), NoPositions()


def position_schemes(tokens: int) -> dict[str, PositionScheme]:
    """Returns ways to mark positions, for rows of `tokens`. (Su et al. 2021, section 2, names them.)"""
    return {
        "rotary": ROTARY,
        "relative": Relative(16),
        "T5 bias": T5Bias(max_distance=tokens),
        "ALiBi": LinearBias(),
        "sinusoidal": Sinusoidal(),
        "learned": Learned(tokens),
        "none": NONE,
    }


POSITIONS = Contest(
    schemes=position_schemes(Budget().tokens),
    claims={
        "rotary": lambda apart: every(apart[name].higher for name in ("sinusoidal", "learned")),
        "none": lambda apart: apart["none"].higher,
    },
    budget=Budget(seeds=(0, 1, 2, 3)),
    title="one switch, equal budgets: how positions are marked",
)

# A question of a reader of Su et al. 2021, who did not try it.
ROTARY_LAYERS = Contest(
    schemes={
        "all": PerLayer((ROTARY,)),
        "every other": PerLayer((ROTARY, NONE)),
        "first only": PerLayer((ROTARY, NONE, NONE, NONE)),
        "last only": PerLayer((NONE, NONE, NONE, ROTARY)),
        "none": NONE,
    },
    claims={
        "first": lambda apart: apart["first only"].higher,
        "other": lambda apart: apart["every other"].higher,
        "none": lambda apart: apart["none"].higher,
    },
    layers=4,
    title="which of 4 layers turn queries and keys",
)

# Su et al. 2021: almost any smooth monotone choice of frequencies works, equal frequencies do not, and only queries and
# keys are rotated.
ROTARY_SWITCHES = Contest(
    schemes={
        "powers": ROTARY,
        "linear": Rotary(pairing="halves", schedule="linear"),
        "quadratic": Rotary(pairing="halves", schedule="quadratic"),
        "cosine": Rotary(pairing="halves", schedule="cosine"),
        "equal to 1": Rotary(pairing="halves", schedule="equal"),
        "equal to 1/base": Rotary(pairing="halves", schedule=(1e-4,) * 8),
        "powers, values too": Rotary(pairing="halves", values=True),
        "none": NONE,
    },
    claims={
        "equal": lambda apart: every(apart[name].higher for name in ("equal to 1", "equal to 1/base")),
        "falling": lambda apart: any(apart[name].seen for name in ("linear", "quadratic", "cosine")) or None,
        "values": lambda apart: apart["powers, values too"].higher,
    },
    title="rotary: which frequencies, and whether values turn",
)

CONTESTS = {"positions": POSITIONS, "rotary-layers": ROTARY_LAYERS, "rotary-switches": ROTARY_SWITCHES}
