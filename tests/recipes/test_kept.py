"""Verdicts and tables of result pages follow from the numbers of their seeds, if these are kept."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.recipes.kept import LANGUAGES, RESULTS, blocks, kept_names, kept_report, report_of
from tests.recipes.test_shipped import RECIPES

NOT_KEPT = {
    *("gqa-uptrain", "long-classify", "long-qa"),
    *("longformer-charlm", "roformer-chinese", "roformer-six"),
}
"""Recipes that ran before numbers of single seeds were kept: their pages have means, spreads and counts only."""


def test_every_recipe_s_numbers_are_kept_or_named_here() -> None:
    assert sorted([*kept_names(), *NOT_KEPT]) == RECIPES


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", kept_names())
def test_pages_say_what_the_numbers_of_the_seeds_say(name: str, language: str) -> None:
    page = (RESULTS / f"{name}{LANGUAGES[language]}").read_text(encoding="utf-8")
    report = kept_report(name, language)
    assert blocks(page) == blocks(report.markdown())
    assert len(report.verdicts) == len(blocks(page)["claims"].splitlines()) > 0


def others(name: str, kept: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the numbers with another value of one measure of the last seed, for each claim that compares one."""
    for claim in report_of(name, kept).recipe.claims:
        stage, measure = claim.operands[0]
        changed = copy.deepcopy(kept)
        record = next(entry for entry in changed["seeds"][-1]["stages"] if entry["stage"] == stage)
        record["measures"][measure] *= 1.5
        yield changed


@pytest.mark.parametrize("name", kept_names())
def test_another_number_of_one_seed_is_noticed(name: str) -> None:
    kept = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    page = blocks((RESULTS / f"{name}.md").read_text(encoding="utf-8"))
    assert all(blocks(report_of(name, changed).markdown()) != page for changed in others(name, kept))
