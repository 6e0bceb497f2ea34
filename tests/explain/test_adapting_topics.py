"""The topics of adapting a model, and that their verdicts can differ."""

from collections.abc import Mapping
from types import ModuleType

import pytest

from headway_lab.explain import adapters, packing
from headway_lab.explain.report import Report
from tests.explain.toys import lost


@pytest.mark.parametrize("module", [adapters, packing], ids=lambda m: m.__name__)
def test_they_are_seen(module: ModuleType, reports: Mapping[ModuleType, Report]) -> None:
    assert reports[module].seen, reports[module].verdict


@pytest.mark.parametrize(
    ("name", "value", "claim"),
    [
        ("change at first", 1e-9, "fresh"),
        ("change with B", 0.0, "with B"),
        ("merged - apart", 1e-9, "merged"),
        ("rank of W' - W", 5, "rank"),
        ("unmerged is W", False, "unmerged"),
    ],
)
def test_a_claim_about_adapters_is_judged_by_the_worst_rank(
    name: str, value: object, claim: str, reports: Mapping[ModuleType, Report]
) -> None:
    rows = reports[adapters].rows
    for worst in range(len(rows)):
        changed = [{**row, name: value} if i == worst else row for i, row in enumerate(rows)]
        assert lost(adapters.judge(changed)) == [claim]
    assert not adapters.judge([*rows[:2], {**rows[2], "share": 0.03}, rows[3]]).seen


@pytest.mark.parametrize(
    ("way", "change", "claim"),
    [
        ("packed", {"filled": 0.9}, "packed"),
        ("padded", {"filled": 0.8}, "padded"),
        ("packed with bounds", {"difference": 1e-6}, "kept"),
        ("packed without", {"difference": 0.0}, "leaked"),
    ],
)
def test_a_claim_about_packing_is_judged_by_the_worst_seed(
    way: str, change: dict[str, float], claim: str, reports: Mapping[ModuleType, Report]
) -> None:
    rows = reports[packing].rows
    for worst in (i for i, row in enumerate(rows) if row["way"] == way):
        changed = [{**row, **change} if i == worst else row for i, row in enumerate(rows)]
        assert lost(packing.judge(changed)) == [claim]
