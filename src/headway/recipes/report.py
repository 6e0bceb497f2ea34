"""What a recipe found: one row per stage, the spread over seeds, and what that says of its claims."""

from collections.abc import Mapping
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
        for stage, own, record in zip(self.recipe.stages, self.measured, self.records[0], strict=True):
            came = f"{own.task} from {stage.source}" if stage.source else str(own.task)
            length, steps = record["run"]["settings"].get("context"), record["measures"]["steps"]
            values = [_spread(own.values.get(key)) for key in self.columns]
            others = [cell(stage.published.get(key)) for key in published]
            body.append([stage.name, came, cell(length), cell(steps), *values, *others])
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


def _spread(found: tuple[float, float] | None) -> str:
    """`1.234 ± 0.005`: mean and standard deviation; one value as it is."""
    mean, deviation = found or (None, 0.0)
    return f"{cell(mean)} ± {deviation:.2g}" if deviation else cell(mean)
