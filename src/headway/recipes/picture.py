"""What a recipe's claims compare, as a picture: a panel for each measure, a line for each stage."""

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.draw import BLUE, GREEN, GREY, ORANGE, RED, VIOLET, saved_figure
from headway.recipes.claims import Claim

BEFORE, AFTER = "before the stage", "after it"
LESS = {"loss": ", nats: less is better", "bits_per_byte": ": less is better"}
OTHERS = (ORANGE, GREEN, VIOLET, RED)
"""Colours of what is measured in another way: in rows of another length, of one turn."""
PLACES = (0.25, -0.25, 0.13, -0.13)
"""And its places, above and below the stage's own line."""


@dataclass(frozen=True)
class Measured:
    """A stage as its row of the table says it. `values`: by measure, the mean over the seeds and its standard
    deviation."""

    stage: str
    task: str
    fresh: bool
    values: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One measure of `stages` (name: label, from above), by how it was measured, and stage."""

    title: str
    stages: Mapping[str, str]
    marks: Mapping[str, Mapping[str, tuple[float, float]]]


def spread_of(values: Iterable[Any]) -> tuple[float, float] | None:
    """Mean and standard deviation (n - 1; 0 of one value) of the numbers among them; None without any, NaN where one of
    several is not finite."""
    numbers = [v for v in values if isinstance(v, int | float)]
    if not numbers:
        return None
    if len({*numbers}) == 1:
        return numbers[0], 0.0
    if not all(map(math.isfinite, numbers)):
        return math.nan, 0.0
    return statistics.fmean(numbers), statistics.stdev(numbers)


def panels(claims: Sequence[Claim], stages: Sequence[Measured]) -> Iterator[Panel]:
    """For each measure that `claims` compare: of all stages of a task that they name, the values after training and,
    where it did not begin with fresh weights, before."""
    task = {stage.stage: stage.task for stage in stages}
    named: dict[str, list[tuple[str, str]]] = {}
    for claim in claims:
        for stage, measure in claim.operands:
            named.setdefault(_kind(measure), []).append((stage, measure))
    for kind, operands in named.items():
        tasks = {task[stage] for stage, _ in operands}
        shown = [stage for stage in stages if stage.task in tasks]
        held_out = any(measure.startswith(("start_", "val_")) for _, measure in operands)
        wanted = {BEFORE: f"start_{kind}", AFTER: f"val_{kind}"} if held_out else {AFTER: kind}
        others = sorted({m for _, m in operands} - {*wanted.values()}, key=lambda m: (len(m), m))
        wanted |= {_label(measure): measure for measure in others}
        marks = {
            label: {
                s.stage: s.values[m] for s in shown if m in s.values and not (label == BEFORE and s.fresh)
            }
            for label, m in wanted.items()
        }
        labels = {s.stage: f"{s.stage} ({s.task})" if len(tasks) > 1 else s.stage for s in shown}
        title = "held-out " * held_out + kind.replace("_", " ") + LESS.get(kind, "")
        yield Panel(title, labels, {label: found for label, found in marks.items() if found})


def _kind(measure: str) -> str:
    """`loss` of `val_loss`, `start_loss`, `val_loss@256` and `val_loss_turn_1`."""
    return re.split(r"@|_turn_", measure.removeprefix("start_").removeprefix("val_"))[0]


def _label(measure: str) -> str:
    """What sets `val_loss@256` or `val_loss_turn_1` apart."""
    return re.split(r"(?=@)|_(?=turn_)", measure)[-1].replace("@", "rows of ").replace("_", " ")


def draw_panels(found: Sequence[Panel], path: Path) -> None:
    """Side by side: stages downwards, each from before (hollow) to after (full), with the standard deviation."""
    most = max(len(panel.stages) for panel in found)
    with saved_figure(path, width=2.5 + 4.2 * len(found), height=1.7 + 0.3 * most) as figure:
        for axes, panel in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
            draw_panel(axes, panel)


def draw_panel(axes: Any, panel: Panel) -> None:
    """One measure of all its stages."""
    place = {stage: i for i, stage in enumerate(panel.stages)}
    before, after = panel.marks.get(BEFORE, {}), panel.marks.get(AFTER, {})
    for stage in before.keys() & after.keys():
        ends = [before[stage][0], after[stage][0]]
        axes.plot(ends, [place[stage]] * 2, color=GREY, linewidth=1, zorder=1)
    others = iter(zip(OTHERS, PLACES, strict=True))
    for label, by in panel.marks.items():
        colour, apart = {BEFORE: (GREY, 0.0), AFTER: (BLUE, 0.0)}.get(label) or next(others)
        means, spreads = zip(*by.values(), strict=True)
        axes.errorbar(
            means,
            [place[stage] + apart for stage in by],
            xerr=spreads if any(spreads) else None,
            fmt="o",
            markersize=6,
            markerfacecolor="white" if label == BEFORE else colour,
            color=colour,
            elinewidth=1.2,
            capsize=2,
            label=label,
        )
    axes.set_yticks(range(len(place)), panel.stages.values())
    axes.set_ylim(len(place) - 0.5, -0.5)
    axes.locator_params("x", nbins=6)
    axes.tick_params(axis="y", length=0)
    axes.set_title(panel.title)
    if len(panel.marks) > 1:
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.35 / (0.3 * len(place) + 0.4)), ncols=3, fontsize=8
        )
