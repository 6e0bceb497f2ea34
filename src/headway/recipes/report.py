"""The report of a recipe: a table with one row per stage and the spread over seeds, the verdicts on its claims, and a
figure of the measures that the claims compare, with one panel per measure and one line per stage."""

import math
import re
import statistics
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import Any

from headway.fonts import fonts
from headway.language import Translation
from headway.patterns.picture import BLUE, GREEN, GREY, INK, ORANGE, PALE, RED, VIOLET
from headway.recipes.claims import Claim
from headway.recipes.recipe import Recipe
from headway.report import cell, plain, table

HEADS = ("stage", "task", "length", "steps")
BEFORE, AFTER = "before the stage", "after it"
LESS = {"loss": ", nats: less is better", "bits_per_byte": ": less is better"}
OTHERS = (ORANGE, GREEN, VIOLET, RED)
"""Colours of values measured in other ways: in rows of another length, or for one turn."""
PLACES = (0.25, -0.25, 0.13, -0.13)
"""Vertical offsets of these values from the stage's line."""
STYLE: Any = {
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "legend.frameon": False,
}


@cache
def translation(language: str) -> Translation:
    """Returns the translation of verdicts, column heads, labels, and the claims of the shipped recipes. Claims are
    looked up in its `table` only, since a user's claim might match one of its templates."""
    if language == "en":
        return Translation({})
    text = files("headway.recipes").joinpath(f"{language}.toml").read_text(encoding="utf-8")
    return Translation(tomllib.loads(text))


@dataclass(frozen=True)
class Measured:
    """The measures of a stage over all seeds. `fresh`: whether it began with fresh weights. `values`: mean and standard
    deviation over the seeds, by measure."""

    stage: str
    task: str
    fresh: bool
    values: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """A panel of the figure, for one measure. `stages`: label of each stage, from top to bottom. `marks`: mean and
    standard deviation, by how it was measured (before or after training, row length, turn) and by stage."""

    title: str
    stages: Mapping[str, str]
    marks: Mapping[str, Mapping[str, tuple[float, float]]]


def spread_of(values: Iterable[Any]) -> tuple[float, float] | None:
    """Returns mean and standard deviation (with n - 1; 0 for equal values) of the numbers among the values; None if
    there are none; mean NaN if they differ and one is not finite."""
    numbers = [v for v in values if isinstance(v, int | float)]
    if not numbers:
        return None
    if len({*numbers}) == 1:
        return numbers[0], 0.0
    if not all(map(math.isfinite, numbers)):
        return math.nan, 0.0
    return statistics.fmean(numbers), statistics.stdev(numbers)


def panels(claims: Sequence[Claim], stages: Sequence[Measured]) -> Iterator[Panel]:
    """Yields a panel for each measure that the claims compare. It shows all stages of the tasks that these claims name,
    with the values after training and, unless the stage began with fresh weights, before."""
    task = {stage.stage: stage.task for stage in stages}
    named: dict[str, list[tuple[str, str]]] = {}
    for claim in claims:
        for stage, measure in claim.operands:
            named.setdefault(_kind(measure), []).append((stage, measure))
    for kind, operands in named.items():
        tasks = {task[stage] for stage, _ in operands}
        shown = [stage for stage in stages if stage.task in tasks]
        held_out = any(measure.startswith(("start_", "val_")) for _, measure in operands)
        measures = {BEFORE: f"start_{kind}", AFTER: f"val_{kind}"} if held_out else {AFTER: kind}
        other_measures = sorted({m for _, m in operands} - {*measures.values()}, key=lambda m: (len(m), m))
        measures |= {_label(measure): measure for measure in other_measures}
        marks = {
            label: {
                s.stage: s.values[m] for s in shown if m in s.values and not (label == BEFORE and s.fresh)
            }
            for label, m in measures.items()
        }
        labels = {s.stage: f"{s.stage} ({s.task})" if len(tasks) > 1 else s.stage for s in shown}
        title = "held-out " * held_out + kind.replace("_", " ") + LESS.get(kind, "")
        yield Panel(title, labels, {label: values for label, values in marks.items() if values})


def _kind(measure: str) -> str:
    """Returns the measure's name without prefix and suffix: `loss` for `val_loss`, `start_loss`, `val_loss@256` and
    `val_loss_turn_1`."""
    return re.split(r"@|_turn_", measure.removeprefix("start_").removeprefix("val_"))[0]


def _label(measure: str) -> str:
    """Returns a label for the suffix of a measure: "rows of 256" for `val_loss@256`, "turn 1" for `val_loss_turn_1`."""
    return re.split(r"(?=@)|_(?=turn_)", measure)[-1].replace("@", "rows of ").replace("_", " ")


def draw_panels(drawn: Sequence[Panel], path: Path, language: str = "en") -> None:
    """Draws panels side by side. Stages are listed from top to bottom, each with a line from its value before training
    (hollow) to that after (filled), and the standard deviations as error bars.

    Raises ConfigError if no font has the characters of the language."""
    import matplotlib
    from matplotlib.figure import Figure

    size = 2.5 + 4.2 * len(drawn), 1.7 + 0.3 * max(len(panel.stages) for panel in drawn)
    weight = "bold" if language == "en" else "normal"  # fonts of other characters may have one weight
    with matplotlib.rc_context({**STYLE, "axes.titleweight": weight, "font.family": fonts(language)}):
        figure = Figure(size, dpi=150, layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
            draw_panel(axes, panel, translation(language))
        figure.savefig(path, bbox_inches="tight")


def draw_panel(axes: Any, panel: Panel, say: Translation) -> None:
    """Draws a panel, with labels translated by `say`."""
    row_of = {stage: i for i, stage in enumerate(panel.stages)}
    before, after = panel.marks.get(BEFORE, {}), panel.marks.get(AFTER, {})
    for stage in before.keys() & after.keys():
        ends = [before[stage][0], after[stage][0]]
        axes.plot(ends, [row_of[stage]] * 2, color=GREY, linewidth=1, zorder=1)
    others = zip(cycle(OTHERS), cycle(PLACES))  # the fifth has the first one's colour again
    for label, values in panel.marks.items():
        colour, offset = {BEFORE: (GREY, 0.0), AFTER: (BLUE, 0.0)}.get(label) or next(others)
        means, spreads = zip(*values.values(), strict=True)
        axes.errorbar(
            means,
            [row_of[stage] + offset for stage in values],
            xerr=spreads if any(spreads) else None,
            fmt="o",
            markersize=6,
            markerfacecolor="white" if label == BEFORE else colour,
            color=colour,
            elinewidth=1.2,
            capsize=2,
            label=say(label),
        )
    axes.set_yticks(range(len(row_of)), panel.stages.values())
    axes.set_ylim(len(row_of) - 0.5, -0.5)
    axes.locator_params("x", nbins=6)
    axes.tick_params(axis="y", length=0)
    axes.set_title(say(panel.title))
    if len(panel.marks) > 1:
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.35 / (0.3 * len(row_of) + 0.4)), ncols=3, fontsize=8
        )


USUAL = ("loss", "accuracy", "val_loss", "val_accuracy", "val_bits_per_byte")
LAST = ("seconds",)
INTERNAL = {
    "tokens_per_s",
    "trained_tokens",
    "parameters",
    "kv_bytes_per_token",
    "steps",
    "bits_per_byte",
    "val_tokens",
}


@dataclass(frozen=True)
class RecipeReport:
    """The results of all stages for all seeds.

    Attributes:
        records: for each seed, for each stage: its name, settings and measures.
        language: language of the table and of the sentences on claims; `verdicts` and JSON are in English.
    """

    recipe: Recipe
    records: tuple[tuple[Mapping[str, Any], ...], ...]
    language: str = "en"

    def measures(self, index: int) -> dict[str, Mapping[str, Any]]:
        """Returns the measures of the `index`-th seed, by stage."""
        return {record["stage"]: record["measures"] for record in self.records[index]}

    @property
    def verdicts(self) -> list[tuple[str, str, str]]:
        """The claims as (text, rule, verdict)."""
        seeds = [self.measures(i) for i in range(len(self.records))]
        return [(claim.text, claim.rule, claim.verdict(seeds)) for claim in self.recipe.claims]

    @property
    def sentences(self) -> list[tuple[str, str]]:
        """The claims as (sentence with verdict and text, rule), in the report's language."""
        say = translation(self.language)
        return [
            (say.fill("{verdict}: {claim}", verdict=say(verdict), claim=say.table.get(text, text)), rule)
            for text, rule, verdict in self.verdicts
        ]

    @property
    def measured(self) -> list[Measured]:
        """The stages, each with the means and standard deviations of its measures over the seeds."""
        stages = []
        for i, stage in enumerate(self.recipe.stages):
            by_seed = [records[i]["measures"] for records in self.records]
            spreads = {
                name: spread_of(m.get(name) for m in by_seed)
                for name in dict.fromkeys(k for m in by_seed for k in m)
            }
            values = {name: value for name, value in spreads.items() if value is not None}
            stages.append(Measured(stage.name, self.records[0][i]["task"], stage.source is None, values))
        return stages

    @property
    def columns(self) -> tuple[str, ...]:
        """The measures in the table: the recipe's columns, else the usual ones and further measures of the tasks."""
        if self.recipe.columns:
            return self.recipe.columns
        measured = dict.fromkeys(key for records in self.records for r in records for key in r["measures"])
        further = [
            key for key in measured if key not in (*USUAL, *LAST, *INTERNAL) and not key.startswith("start_")
        ]
        return tuple(key for key in (*USUAL, *further, *LAST) if key in measured)

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Returns the table's column heads and cells; measures are mean ± standard deviation over the seeds."""
        published = list(dict.fromkeys(key for stage in self.recipe.stages for key in stage.published))
        say = translation(self.language)
        names = [say(key) if key in HEADS else key for key in published]
        published_heads = [say.fill("published {name}", name=name) for name in names]
        head = [*map(say, HEADS), *self.columns, *published_heads]
        body = []
        for stage, measured, record in zip(self.recipe.stages, self.measured, self.records[0], strict=True):
            origin = measured.task
            if stage.source:
                origin = say.fill("{task} from {stage}", task=measured.task, stage=stage.source)
            length, steps = record["run"]["settings"].get("context"), record["measures"]["steps"]
            values = [_spread(measured.values.get(key)) for key in self.columns]
            published_cells = [cell(stage.published.get(key)) for key in published]
            body.append([stage.name, origin, cell(length), cell(steps), *values, *published_cells])
        return head, body

    def text(self) -> str:
        """Returns the table and the verdicts as text for a terminal."""
        lines = [table(*self.rows())]
        lines += [f"  {sentence}\n      {rule}" for sentence, rule in self.sentences]
        return "\n".join(lines)

    def markdown(self) -> str:
        """Returns the table and the verdicts as Markdown."""
        head, body = self.rows()
        lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)]
        lines += ["", *(f"- {sentence} (`{rule}`)" for sentence, rule in self.sentences)]
        return "\n".join(lines) + "\n"

    def plain(self) -> dict[str, Any]:
        """Returns the report as values that JSON can represent."""
        claims = [{"claim": text, "rule": rule, "verdict": verdict} for text, rule, verdict in self.verdicts]
        return {"seeds": plain(self.recipe.seeds), "stages": plain(self.records), "claims": claims}


def _spread(value: tuple[float, float] | None) -> str:
    """Returns mean and standard deviation as `1.234 ± 0.005`; without deviation, the mean alone."""
    mean, deviation = value or (None, 0.0)
    return f"{cell(mean)} ± {deviation:.2g}" if deviation else cell(mean)
