"""The topic of packing, and that its verdict can differ."""

from collections.abc import Mapping
from types import ModuleType

import pytest

from headway_lab.explain import packing
from headway_lab.explain.report import Report
from tests.explain import toys


@pytest.fixture
def reports() -> Mapping[ModuleType, Report]:
    return toys.Reports()


def test_it_is_seen(reports: Mapping[ModuleType, Report]) -> None:
    assert reports[packing].seen, reports[packing].verdict


def lost(report: Report) -> list[str]:
    return [claim for claim, seen in report.claims.items() if not seen]


@pytest.mark.parametrize(
    ("way", "change", "claim"),
    [
        ("packed", {"filled": 0.9}, "packing fills over 97 % of the slots, for every seed"),
        ("padded", {"filled": 0.8}, "padding fills under 70 %"),
        ("packed with bounds", {"difference": 1e-6}, "with bounds, packed examples are themselves"),
        ("packed without", {"difference": 0.0}, "without, each sees those before it"),
    ],
)
def test_a_claim_about_packing_is_judged_by_the_worst_seed(
    way: str, change: dict[str, float], claim: str, reports: Mapping[ModuleType, Report]
) -> None:
    rows = reports[packing].rows
    for worst in (i for i, row in enumerate(rows) if row["way"] == way):
        changed = [{**row, **change} if i == worst else row for i, row in enumerate(rows)]
        assert lost(packing.judge(changed)) == [claim]
