"""What a recipe found: one row per stage, the spread over seeds, and what that says of its claims."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.recipes.picture import Measured, spread_of
from headway.recipes.recipe import Recipe
from headway.report import cell, plain, table

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
    """

    recipe: Recipe
    records: tuple[tuple[Mapping[str, Any], ...], ...]

    def measures(self, index: int) -> dict[str, Mapping[str, Any]]:
        """Of the seed number `index`, by stage."""
        return {record["stage"]: record["measures"] for record in self.records[index]}

    @property
    def verdicts(self) -> list[tuple[str, str, str]]:
        """Each claim: its words, its rule, and whether it was seen."""
        seeds = [self.measures(i) for i in range(len(self.records))]
        return [(claim.text, claim.rule, claim.verdict(seeds)) for claim in self.recipe.claims]

    @property
    def measured(self) -> list[Measured]:
        """Each stage with the means and standard deviations of its measures."""
        found = []
        for i, stage in enumerate(self.recipe.stages):
            own = [records[i]["measures"] for records in self.records]
            spreads = {
                name: spread_of(m.get(name) for m in own) for name in dict.fromkeys(k for m in own for k in m)
            }
            values = {name: value for name, value in spreads.items() if value is not None}
            found.append(Measured(stage.name, self.records[0][i]["task"], stage.source is None, values))
        return found

    @property
    def columns(self) -> tuple[str, ...]:
        """The measures of the table: the recipe's, else the usual ones and what the tasks measured besides."""
        if self.recipe.columns:
            return self.recipe.columns
        there = dict.fromkeys(key for records in self.records for r in records for key in r["measures"])
        own = [key for key in there if key not in (*USUAL, *LAST, *INTERNAL) and not key.startswith("start_")]
        return tuple(key for key in (*USUAL, *own, *LAST) if key in there)

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """The table's columns and cells: mean ± standard deviation over the seeds."""
        published = list(dict.fromkeys(key for stage in self.recipe.stages for key in stage.published))
        head = ["stage", "task", "length", "steps", *self.columns, *(f"published {key}" for key in published)]
        body = []
        for i, stage in enumerate(self.recipe.stages):
            of_seeds = [records[i]["measures"] for records in self.records]
            task, settings = self.records[0][i]["task"], self.records[0][i]["run"]["settings"]
            measured = [spread([m.get(key) for m in of_seeds]) for key in self.columns]
            others = [cell(stage.published.get(key)) for key in published]
            came = f"{task} from {stage.source}" if stage.source else str(task)
            begun = [stage.name, came, cell(settings.get("context"))]
            body.append([*begun, cell(of_seeds[0]["steps"]), *measured, *others])
        return head, body

    def text(self) -> str:
        """For a terminal."""
        lines = [table(*self.rows())]
        lines += [f"  {said}: {text}\n      {rule}" for text, rule, said in self.verdicts]
        return "\n".join(lines)

    def markdown(self) -> str:
        """For a page."""
        head, body = self.rows()
        lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)]
        lines += ["", *(f"- {said}: {text} (`{rule}`)" for text, rule, said in self.verdicts)]
        return "\n".join(lines) + "\n"

    def plain(self) -> dict[str, Any]:
        """In JSON's own types."""
        claims = [{"claim": text, "rule": rule, "verdict": said} for text, rule, said in self.verdicts]
        return {"seeds": plain(self.recipe.seeds), "stages": plain(self.records), "claims": claims}


def spread(values: Sequence[Any]) -> str:
    """`1.234 ± 0.005`: mean and standard deviation (n - 1); one value as it is."""
    numbers = [value for value in values if isinstance(value, int | float)]
    if not numbers:
        return ""
    if len(numbers) == 1 or len({*numbers}) == 1:
        return cell(numbers[0])
    return f"{cell(float(statistics.fmean(numbers)))} ± {statistics.stdev(numbers):.2g}"
