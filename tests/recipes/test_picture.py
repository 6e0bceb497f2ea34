"""The picture of a recipe: the measures that its claims compare, before and after training."""

import math
from pathlib import Path

import pytest

from headway.recipes.claims import Claim
from headway.recipes.report import AFTER, BEFORE, Measured, Panel, draw_panels, panels, spread_of

STAGES = (
    Measured(
        "base", "causal-lm", True, {"start_loss": (8.3, 0.0), "val_loss": (4.9, 0.1), "speed": (3.0, 0.0)}
    ),
    Measured(
        "long",
        "causal-lm",
        False,
        {"start_loss": (5.0, 0.0), "val_loss": (4.8, 0.0), "val_loss@64": (4.7, 0.0)},
    ),
    Measured("chat", "chat", False, {"start_loss": (7.0, 0.0), "val_loss": (4.4, 0.0)}),
)


def panels_of(*rules: str) -> list[Panel]:
    claims = [Claim.read(rule, rule, [stage.stage for stage in STAGES]) for rule in rules]
    return list(panels(claims, STAGES))


def test_claims_name_what_they_compare() -> None:
    claim = Claim.read("both", "long.val_loss@64 < base.val_loss + 0.1 < base.start_loss", ["base", "long"])
    assert {*claim.operands} == {("long", "val_loss@64"), ("base", "val_loss"), ("base", "start_loss")}


def test_a_panel_has_the_stages_of_the_claimed_task_before_and_after() -> None:
    (panel,) = panels_of("long.val_loss < long.start_loss")
    assert panel.title == "held-out loss, nats: less is better"
    assert list(panel.stages) == ["base", "long"]
    assert panel.marks == {BEFORE: {"long": (5.0, 0.0)}, AFTER: {"base": (4.9, 0.1), "long": (4.8, 0.0)}}


def test_rows_of_another_length_are_marks_of_the_same_panel_and_other_measures_have_their_own() -> None:
    loss, speed = panels_of("long.val_loss@64 < chat.val_loss", "base.speed > 1")
    assert loss.marks["rows of 64"] == {"long": (4.7, 0.0)}
    assert loss.stages["chat"] == "chat (chat)"
    assert speed.marks == {AFTER: {"base": (3.0, 0.0)}}


def test_no_claims_are_no_panels() -> None:
    assert panels_of() == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1.0, 3.0), (2.0, 2**0.5)),
        ((4,), (4.0, 0.0)),
        ((7, 7), (7, 0.0)),
        ((1.0, math.nan), (math.nan, 0.0)),
        ((None,), None),
    ],
)
def test_a_spread_is_mean_and_standard_deviation(
    values: tuple[float | None, ...], expected: tuple[float, float] | None
) -> None:
    assert spread_of(values) == pytest.approx(expected, nan_ok=True)


def test_more_row_lengths_than_colours_are_drawn(tmp_path: Path) -> None:
    measures = {f"val_loss@{2**i}": (1.0, 0.0) for i in range(6)}
    stage = Measured("base", "causal-lm", True, {"val_loss": (4.9, 0.1), **measures})
    rule = " < ".join(f"base.{measure}" for measure in ("val_loss", *measures))
    (panel,) = panels([Claim.read(rule, rule, ["base"])], [stage])
    assert len(panel.marks) == 7
    draw_panels([panel], tmp_path / "report.png")


def test_it_is_drawn(tmp_path: Path) -> None:
    draw_panels(panels_of("long.val_loss@64 < chat.val_loss", "base.speed > 1"), tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
