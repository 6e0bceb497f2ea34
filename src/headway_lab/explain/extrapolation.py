"""Rows longer than those in training: which ways to mark positions can read them. (Su et al. 2021; Press et al.
2021.)"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from headway.data import Batch
from headway.models import ModelSpec, build
from headway.nn import IGNORE_INDEX
from headway.patterns import Window
from headway.positions import DynamicNTK, LinearScaling, Rotary, YaRN
from headway_lab.draw import INK
from headway_lab.explain.contests import position_schemes
from headway_lab.explain.figures import Axes, Panel, label_axes, panels
from headway_lab.explain.report import Report, Row
from headway_lab.explain.runs import Budget, Run, Runs, contend, held_out_rows, mean_loss, small
from headway_lab.explain.spread import every, gap
from headway_lab.profiling import one_thread

BUDGET = Budget()
TIMES, ROWS, MARGIN = (1, 2, 4, 8), 32, 0.05  # nats
RESCALED = ("rotary, linear", "rotary, NTK", "rotary, YaRN")


def variants(name: str, spec: ModelSpec, times: int) -> dict[str, ModelSpec]:
    """Returns the specs with which a contender's weights are evaluated at `times` the training length, by name."""
    specs = {name: spec}
    if isinstance(spec.positions, Rotary):
        length, rotary = BUDGET.tokens, spec.positions
        rules = {"linear": LinearScaling(times), "NTK": DynamicNTK(1.0, length), "YaRN": YaRN(times, length)}
        for rule, scaling in rules.items():
            scaled = rotary if times == 1 else replace(rotary, scaling=scaling)
            specs[f"{name}, {rule}"] = replace(spec, positions=scaled)
        specs[f"{name}, window L"] = spec.with_patterns(Window.last(length))
    return specs


def run(*, seeds: Sequence[int] = BUDGET.seeds, steps: int = BUDGET.steps) -> Report:
    """Trains every scheme on rows of L bytes, and measures its loss at 1 .. 8 L."""
    budget = replace(BUDGET, seeds=tuple(seeds), steps=steps)
    specs = {name: small(positions=scheme) for name, scheme in position_schemes(budget.tokens).items()}
    return judge(measure(contend(specs, budget)), budget)


def measure(runs: Runs) -> dict[str, list[list[float] | None]]:
    """Returns, for each variant and each of `TIMES`, the losses of all seeds, or None if rows of that length are
    refused (a table of learned positions ends)."""
    results: dict[str, list[list[float] | None]] = {}
    with one_thread():
        for name, trained in runs.items():
            for times in TIMES:
                for variant, spec in variants(name, trained[0].model.spec, times).items():
                    limit = spec.context_limit
                    fits = limit is None or times * BUDGET.tokens <= limit
                    losses = [tail_loss(run, spec, times) for run in trained] if fits else None
                    results.setdefault(variant, []).append(losses)
    return results


def tail_loss(run: Run, spec: ModelSpec, times: int) -> float:
    """Returns the loss of the last L bytes of the held-out rows of 8 L, given their last `times` L."""
    length = BUDGET.tokens
    model = build(spec, seed=0)
    model.load_state_dict(run.model.state_dict())
    ids = held_out_rows(TIMES[-1] * length, ROWS)[:, -times * length - 1 :]
    targets = ids[:, 1:].clone()
    targets[:, :-length] = IGNORE_INDEX
    return mean_loss(model, Batch({"ids": ids[:, :-1]}, targets))


def judge(results: Mapping[str, Sequence[list[float] | None]], budget: Budget) -> Report:
    """Returns the verdict: whether rotary as it was trained reads longer rows, and what else does."""
    ends = {name: losses[-1] for name, losses in results.items() if losses[-1] is not None}
    growth = {name: gap(last, results[name][0] or []) for name, last in ends.items()}
    rows: list[Row] = []
    for name, losses in results.items():
        change = growth.get(name)
        rows.append(
            {
                "contender": name,
                **{f"loss at {k} L": x and statistics.fmean(x) for k, x in zip(TIMES, losses, strict=True)},
                f"gap {TIMES[-1]} L to L": change and change.mean,
                "bound": change and change.bound,
                "seen": change and change.seen,
            }
        )
    rotary, window = ends["rotary"], ends["rotary, window L"]
    return Report(
        rows=tuple(rows),
        claims={
            "as well": growth["rotary"].below(MARGIN),
            "sinusoidal": gap(rotary, ends["sinusoidal"]).lower,
            "ALiBi": gap(ends["ALiBi"], rotary).lower,
            "window": growth["rotary, window L"].below(MARGIN),
            "rescaled": every(gap(window, ends[name]).lower for name in RESCALED if name in ends),
        },
        values={
            "budget": budget,
            "most": TIMES[-1],
            "bears": [name for name, change in growth.items() if change.below(MARGIN)],
            "gains": [name for name, change in growth.items() if change.lower],
            "refused": [name for name in results if name not in growth],
        },
    )


def lengths(title: str, shown: Callable[[str], bool], y: str = "") -> Panel:
    """Returns a panel of loss against length, for the contenders for which `shown` is true."""

    def draw(axes: Axes, report: Report) -> None:
        for row in report.rows:
            name, values = row["contender"], [row[f"loss at {k} L"] for k in TIMES]
            style = {"color": INK} if name == "rotary" else {"linestyle": "--" if name == "none" else "-"}
            if shown(name):
                losses = [float("nan") if value is None else value for value in values]
                axes.plot(TIMES, losses, marker="o", markersize=4, label=name, **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(TIMES, [f"{k} L" for k in TIMES])
        label_axes(axes, title, f"context (L = {BUDGET.tokens} bytes, as in training)", y, {"fontsize": 8})

    return draw


draw = panels(
    lengths("as trained", lambda name: not name.startswith("rotary,"), "loss of the same bytes (nats)"),
    lengths("rotary, rescaled or windowed", lambda name: name.startswith("rotary")),
    sharey=True,
)
