"""Numbers of single seeds behind the result pages: docs/results/NAME.json of the recipe NAME, and what follows from
them.

    python -m tests.recipes.kept hybrid runs/hybrid

keeps those of a run, and puts their table, claims and picture on the pages of both languages; prose is written by hand.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.recipes import RecipeReport, read_recipe
from headway.recipes.report import draw_panels, panels
from tests.command_lines import ROOT

RECIPES, RESULTS = ROOT / "recipes", ROOT / "docs" / "results"
LANGUAGES = {"en": ".md", "zh": ".zh.md"}
BLOCKS = re.compile(r"(?P<table>(?:^\|.*\n)+)|(?P<claims>(?:^- .*`[)）]\n)+)", re.MULTILINE)
"""Matches the table of a page and its list of claims."""


def kept_names() -> list[str]:
    """Returns the names of the recipes whose numbers are kept."""
    return sorted(path.stem for path in RESULTS.glob("*.json"))


def kept_report(name: str, language: str = "en") -> RecipeReport:
    """Returns the report of the kept numbers, with the claims that the recipe makes now."""
    return report_of(name, json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")), language)


def report_of(name: str, kept: Mapping[str, Any], language: str = "en") -> RecipeReport:
    """Returns the report of the numbers `kept`, with the claims that the recipe makes now."""
    seeds = json.dumps([entry["seed"] for entry in kept["seeds"]])
    records = tuple(
        tuple({**stage, "run": {"settings": {"context": stage["context"]}}} for stage in entry["stages"])
        for entry in kept["seeds"]
    )
    return RecipeReport(read_recipe(RECIPES / f"{name}.yaml", [f"seeds={seeds}"]), records, language)


def keep(name: str, run: Path) -> None:
    """Writes docs/results/NAME.json from the report.json of a run."""
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    seeds = [
        {
            "seed": seed,
            "stages": [
                {
                    "stage": record["stage"],
                    "task": record["task"],
                    "context": record["run"]["settings"].get("context"),
                    "measures": record["measures"],
                }
                for record in records
            ],
        }
        for seed, records in zip(report["seeds"], report["stages"], strict=True)
    ]
    (RESULTS / f"{name}.json").write_text(json.dumps({"seeds": seeds}, indent=1) + "\n", encoding="utf-8")


def blocks(text: str) -> dict[str, str]:
    """Returns the first table of a page and its first list of claims."""
    first: dict[str, str] = {}
    for match in BLOCKS.finditer(text):
        first.setdefault(str(match.lastgroup), match[0])
    return first


def renew_pages(name: str) -> None:
    """Puts the table and the claims of the kept numbers on both pages, and draws the picture."""
    for language, suffix in LANGUAGES.items():
        path, report = RESULTS / f"{name}{suffix}", kept_report(name, language)
        text = path.read_text(encoding="utf-8")
        new = blocks(report.markdown())
        for kind, old in blocks(text).items():
            text = text.replace(old, new[kind], 1)
        path.write_text(text, encoding="utf-8")
    report = kept_report(name)
    draw_panels([*panels(report.recipe.claims, report.measured)], RESULTS / f"{name}.png")


if __name__ == "__main__":
    keep(sys.argv[1], Path(sys.argv[2]))
    renew_pages(sys.argv[1])
