"""The results of a recipe: one row per stage, the spread over seeds, the verdicts on its claims, and a picture of the
measures that these compare: a panel for each measure, a line for each stage."""

import math
import re
import statistics
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
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
"""Colours of values that are measured in another way: in rows of another length, of one turn."""
PLACES = (0.25, -0.25, 0.13, -0.13)
"""Places of these values, above and below the stage's own line."""
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
    """The translation of verdicts, heads, labels, and claims of the shipped recipes. Claims are looked up in its
    `table`: others' might look like one of its templates."""
    if language == "en":
        return Translation({})
    text = files("headway.recipes").joinpath(f"{language}.toml").read_text(encoding="utf-8")
    return Translation(tomllib.loads(text))


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
    """A panel for each measure that `claims` compare: of all stages of a task that they name, the values after training
    and, where it did not begin with fresh weights, before."""
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
        others = sorted({m for _, m in operands} - {*measures.values()}, key=lambda m: (len(m), m))
        measures |= {_label(measure): measure for measure in others}
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
    """`loss` of `val_loss`, `start_loss`, `val_loss@256` and `val_loss_turn_1`."""
    return re.split(r"@|_turn_", measure.removeprefix("start_").removeprefix("val_"))[0]


def _label(measure: str) -> str:
    """The part of `val_loss@256` or `val_loss_turn_1` that sets it apart: "rows of 256", "turn 1"."""
    return re.split(r"(?=@)|_(?=turn_)", measure)[-1].replace("@", "rows of ").replace("_", " ")


def draw_panels(drawn: Sequence[Panel], path: Path, language: str = "en") -> None:
    """Draws panels side by side: stages downwards, each from before (hollow) to after (full), with the standard
    deviation.

    Raises ConfigError where no font has the characters of the language."""
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
    """Draws one measure of all its stages, with labels in a language."""
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
            label=say(label),
        )
    axes.set_yticks(range(len(place)), panel.stages.values())
    axes.set_ylim(len(place) - 0.5, -0.5)
    axes.locator_params("x", nbins=6)
    axes.tick_params(axis="y", length=0)
    axes.set_title(say(panel.title))
    if len(panel.marks) > 1:
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.35 / (0.3 * len(place) + 0.4)), ncols=3, fontsize=8
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
    """The records of all stages, seed by seed.

    Attributes:
        records: for each seed, for each stage: name, settings and measures.
        language: of the table and of the sentences on claims; `verdicts` and JSON are English.
    """

    recipe: Recipe
    records: tuple[tuple[Mapping[str, Any], ...], ...]
    language: str = "en"

    def measures(self, index: int) -> dict[str, Mapping[str, Any]]:
        """The measures of the seed number `index`, by stage."""
        return {record["stage"]: record["measures"] for record in self.records[index]}

    @property
    def verdicts(self) -> list[tuple[str, str, str]]:
        """Each claim: its words, its rule, and whether it was seen."""
        seeds = [self.measures(i) for i in range(len(self.records))]
        return [(claim.text, claim.rule, claim.verdict(seeds)) for claim in self.recipe.claims]

    @property
    def sentences(self) -> list[tuple[str, str]]:
        """The verdict with its claim, and its rule."""
        say = translation(self.language)
        return [
            (say.fill("{verdict}: {claim}", verdict=say(verdict), claim=say.table.get(text, text)), rule)
            for text, rule, verdict in self.verdicts
        ]

    @property
    def measured(self) -> list[Measured]:
        """Each stage with the means and standard deviations of its measures."""
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
        """The measures of the table: the recipe's, else the usual ones and what the tasks measured besides."""
        if self.recipe.columns:
            return self.recipe.columns
        measured = dict.fromkeys(key for records in self.records for r in records for key in r["measures"])
        others = [
            key for key in measured if key not in (*USUAL, *LAST, *INTERNAL) and not key.startswith("start_")
        ]
        return tuple(key for key in (*USUAL, *others, *LAST) if key in measured)

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """The table's columns and cells: mean ± standard deviation over the seeds."""
        published = list(dict.fromkeys(key for stage in self.recipe.stages for key in stage.published))
        say = translation(self.language)
        names = [say(key) if key in HEADS else key for key in published]
        theirs = [say.fill("published {name}", name=name) for name in names]
        head = [*map(say, HEADS), *self.columns, *theirs]
        body = []
        for stage, measured, record in zip(self.recipe.stages, self.measured, self.records[0], strict=True):
            origin = measured.task
            if stage.source:
                origin = say.fill("{task} from {stage}", task=measured.task, stage=stage.source)
            length, steps = record["run"]["settings"].get("context"), record["measures"]["steps"]
            values = [_spread(measured.values.get(key)) for key in self.columns]
            others = [cell(stage.published.get(key)) for key in published]
            body.append([stage.name, origin, cell(length), cell(steps), *values, *others])
        return head, body

    def text(self) -> str:
        """The table and the verdicts for a terminal."""
        lines = [table(*self.rows())]
        lines += [f"  {sentence}\n      {rule}" for sentence, rule in self.sentences]
        return "\n".join(lines)

    def markdown(self) -> str:
        """The table and the verdicts as Markdown."""
        head, body = self.rows()
        lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)]
        lines += ["", *(f"- {sentence} (`{rule}`)" for sentence, rule in self.sentences)]
        return "\n".join(lines) + "\n"

    def plain(self) -> dict[str, Any]:
        """The report in JSON's own types."""
        claims = [{"claim": text, "rule": rule, "verdict": verdict} for text, rule, verdict in self.verdicts]
        return {"seeds": plain(self.recipe.seeds), "stages": plain(self.records), "claims": claims}


def _spread(value: tuple[float, float] | None) -> str:
    """`1.234 ± 0.005`: mean and standard deviation; one value as it is."""
    mean, deviation = value or (None, 0.0)
    return f"{cell(mean)} ± {deviation:.2g}" if deviation else cell(mean)
