"""The topic heads (rows 9, 51, 52, 53): seen, and able not to be seen."""

import pytest
import torch
from matplotlib.figure import Figure

from headway.heads import Heads
from headway_lab.explain import heads
from headway_lab.explain.report import Report


@pytest.fixture(scope="module")
def found() -> Report:
    return heads.run()


def test_sizes_are_those_of_the_formulas(found: Report) -> None:
    assert found.seen, found.verdict
    assert found.column("kv heads") == [8, 4, 2, 1]
    assert found.column("kind") == ["MHA", "GQA", "GQA", "MQA"]
    assert found.column("parameters") == [64 * 8 * (2 * 8 + 2 * k) for k in (8, 4, 2, 1)]
    assert found.column("of MHA's cache") == [1, 1 / 2, 1 / 4, 1 / 8]


def test_the_printed_formula_gives_other_numbers(found: Report) -> None:
    """E5: a sum of scores over the group is not grouped-query attention, but for groups of one."""
    assert found.column("from summed scores")[0] < 1e-12
    assert min(found.column("from summed scores")[1:]) > 0.1


def test_fewer_kv_heads_move_fewer_bytes_for_about_the_same_operations(found: Report) -> None:
    """Row 37: counted; the time is shown and not judged."""
    flops, moved = found.column("FLOPs / token"), found.column("bytes / token")
    assert flops[0] / flops[-1] < 1.2
    assert moved[0] / moved[-1] > 3
    assert moved == sorted(moved, reverse=True)
    assert all(speed > 0 for speed in found.column("tokens/s"))


def test_the_verdict_can_be_not_seen() -> None:
    full = heads.measure(Heads.of(8, 8))
    grouped = heads.measure(Heads.of(8, 2), full)
    assert heads.judge([full, grouped], True).seen
    assert not heads.judge([full, grouped], False).seen
    for wrong in (
        {"parameters": 1},
        {"cache (B)": 1},
        {"from repeated heads": 1e-3},
        {"from summed scores": 0.0},
    ):
        assert not heads.judge([full, {**grouped, **wrong}], True).seen


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(6, 6), (6, 3), (6, 2), (6, 1), (1, 1)])
def test_gradients_find_the_head_that_is_read(query_heads: int, kv_heads: int) -> None:
    layout = Heads.of(query_heads, kv_heads)
    group = query_heads // kv_heads
    want = torch.tensor([[h // group == k for k in range(kv_heads)] for h in range(query_heads)])
    assert torch.equal(heads.reads(layout), want)


def test_any_layout_is_drawn_as_text() -> None:
    assert heads.picture(Heads.of(6, 2)).splitlines() == [
        "GQA: 6 query heads, 2 kv heads",
        "q0  q1  q2  q3  q4  q5",
        "+-------+   +-------+",
        "kv0         kv1",
    ]
    assert heads.picture(Heads.of(2, 2)).splitlines()[1:] == ["q0  q1", "|   |", "kv0 kv1"]


def test_it_is_drawn(found: Report) -> None:
    figure = Figure()
    heads.draw(figure, found)
    titles = [axes.get_title() or axes.get_title("left") for axes in figure.axes]
    assert any("GQA: 8 on 4" in title for title in titles)
    assert len(figure.axes) == 6
