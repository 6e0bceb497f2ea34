"""The topic heads (rows 9, 51, 52, 53): seen, and not seen if its numbers are wrong."""

import pytest
import torch
from matplotlib.figure import Figure

from headway.heads import Heads
from headway_lab.explain import heads
from headway_lab.explain.report import Report
from headway_lab.explain.spread import Gap
from tests.explain import toys


@pytest.fixture
def found() -> Report:
    return toys.toy("heads").report


def test_sizes_are_those_of_the_formulas(found: Report) -> None:
    assert all(list(found.claims.values())[:-1]), found.verdict  # the last claim is about time
    assert found.column("kv heads") == [8, 4, 2, 1]
    assert found.column("kind") == ["MHA", "GQA", "GQA", "MQA"]
    assert found.column("parameters") == [64 * 8 * (2 * 8 + 2 * k) for k in (8, 4, 2, 1)]
    assert found.column("of MHA's cache") == [1, 1 / 2, 1 / 4, 1 / 8]


def test_row_9_the_printed_formula_gives_other_numbers(found: Report) -> None:
    """E5: a sum of scores over the group is not grouped-query attention, but for groups of one."""
    assert found.column("from summed scores")[0] < 1e-12
    assert min(found.column("from summed scores")[1:]) > 0.1


def test_row_37_fewer_kv_heads_move_fewer_bytes_for_about_the_same_operations(found: Report) -> None:
    """Row 37: bytes and operations are counted."""
    flops, moved = found.column("FLOPs / token"), found.column("bytes / token")
    assert flops[0] / flops[-1] < 1.2
    assert moved[0] / moved[-1] > 1.5
    assert moved == sorted(moved, reverse=True)
    assert all(time > 0 for time in found.column("ms / token"))


def test_each_claim_follows_from_its_own_number(found: Report) -> None:
    """Bytes and time are judged separately: fewer bytes need not mean less time."""
    mha, *between, mqa = found.rows
    quick, slow, unclear = Gap(-0.5, 0.1), Gap(0.5, 0.1), Gap(-0.5, 0.6)
    assert heads.judge(found.rows, quick).seen
    for lost, change in {
        "reads": {"reads others": 1},
        "sizes": {"parameters": 1},
        "repeated": {"from repeated heads": 1e-3},
        "summed": {"from summed scores": 0.0},
        "bytes": {"bytes / token": mha["bytes / token"]},
    }.items():
        wrong = heads.judge([mha, *between, {**mqa, **change}], quick)
        assert [claim for claim, seen in wrong.claims.items() if not seen] == [lost]
    for time in (slow, unclear):
        report = heads.judge(found.rows, time)
        assert [claim for claim, seen in report.claims.items() if not seen] == ["time"]
        assert report.verdict.startswith("seen in part")


def test_row_52_any_layout_is_asked_for() -> None:
    """Row 52."""
    assert [layout.kv_heads for layout in heads.layouts_of(12, 3)] == [12, 3, 1]
    assert [layout.kv_heads for layout in heads.layouts_of(8, None)] == [8, 4, 2, 1]
    assert [layout.kv_heads for layout in heads.layouts_of(12, None)] == [12, 6, 3, 1]


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(6, 6), (6, 3), (6, 2), (6, 1), (1, 1)])
def test_gradients_find_the_head_that_is_read(query_heads: int, kv_heads: int) -> None:
    layout = Heads.of(query_heads, kv_heads)
    group = query_heads // kv_heads
    expected = torch.tensor([[h // group == k for k in range(kv_heads)] for h in range(query_heads)])
    assert torch.equal(heads.reads(layout), expected)


def test_any_layout_is_drawn_as_text() -> None:
    assert heads.picture(Heads.of(6, 2)).splitlines() == [
        "GQA: 6 query heads, 2 kv heads",
        "q0  q1  q2  q3  q4  q5",
        "+-------+   +-------+",
        "kv0         kv1",
    ]
    assert heads.picture(Heads.of(2, 2)).splitlines()[1:] == ["q0  q1", "|   |", "kv0 kv1"]


def test_it_is_drawn_with_a_colour_for_each_group(found: Report) -> None:
    figure = Figure()
    heads.draw(figure, found)
    titles = [axes.get_title() or axes.get_title("left") for axes in figure.axes]
    assert any("GQA: 8 on 4" in title for title in titles)
    assert len(figure.axes) == 7
    for axes, layout in zip(figure.axes, heads.layouts_of(8, None), strict=False):
        keys = [line.get_color() for line in axes.lines if line.get_marker() == "o"]
        assert len(set(keys)) == layout.kv_heads, "a colour that repeats says that heads are shared"
