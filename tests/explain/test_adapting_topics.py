"""The topics of adapting a model, and that their verdicts can differ."""

from types import ModuleType

import pytest
from matplotlib.figure import Figure

from headway_lab.explain import adapters, packing
from headway_lab.explain.report import Report


@pytest.fixture(scope="module")
def reports() -> dict[ModuleType, Report]:
    return {module: module.run() for module in (adapters, packing)}


@pytest.mark.parametrize("module", [adapters, packing], ids=lambda m: m.__name__)
def test_they_are_seen_and_drawn_with_labels(module: ModuleType, reports: dict[ModuleType, Report]) -> None:
    found = reports[module]
    assert found.seen, found.verdict
    figure = Figure()
    module.draw(figure, found)
    assert all(axes.get_title() for axes in figure.axes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("change at first", 1e-9),
        ("change with B", 0.0),
        ("merged - apart", 1e-9),
        ("rank of W' - W", 5),
        ("unmerged is W", False),
    ],
)
def test_the_verdict_of_adapters_follows_each_of_its_numbers(
    name: str, value: object, reports: dict[ModuleType, Report]
) -> None:
    rows = reports[adapters].rows
    assert not adapters.judge([rows[0], {**rows[1], name: value}, *rows[2:]]).seen
    assert not adapters.judge([*rows[:2], {**rows[2], "share": 0.03}, rows[3]]).seen


def test_the_verdict_of_packing_follows_each_of_its_numbers(reports: dict[ModuleType, Report]) -> None:
    rows = reports[packing].rows
    changes = {"packed": {"filled": 0.9}, "padded": {"filled": 0.8}, "packed with bounds": {"difference": 1e-6},
               "packed without": {"difference": 0.0}}  # fmt: skip
    for way, change in changes.items():
        assert not packing.judge([{**row, **(change if row["way"] == way else {})} for row in rows]).seen, way
