"""The topic memory (row 109): what it measures is what it says it measures."""

from typing import Any

import pytest
import torch

from headway.models import cost
from headway_lab.explain import memory
from headway_lab.explain.memory import LiveBytes


def test_live_bytes_sees_what_is_alive_at_once() -> None:
    with LiveBytes() as live:
        a = torch.ones(1000)  # 4000 bytes
        b = a + 1
        del b
        c = a.view(10, 100)  # no memory of its own
        d = c * 2
        del d
    assert live.peak == 8000
    with LiveBytes() as more:
        kept = [a + i for i in range(5)]
    assert more.peak == 20000
    assert len(kept) == 5


@pytest.mark.parametrize("kind", memory.KINDS, ids=lambda kind: kind[0])
def test_prediction_is_what_is_kept_and_less_than_the_peak(kind: tuple[str, memory.Pattern, str]) -> None:
    step = memory.measure(*kind, 256)
    predicted = step["predicted (B)"] + memory.copied(step)
    assert abs(step["kept (B)"] - predicted) < memory.CLOSE * predicted
    assert step["kept (B)"] < step["peak (B)"]
    assert (step["scores (B)"] > 0) == (kind[2] == "dense")


def steps() -> list[dict[str, Any]]:
    """Made up, as the formula would have it."""
    found = []
    for kind, pattern, backend in memory.KINDS:
        for n in memory.LENGTHS:
            pairs = cost.attention_pairs(memory.spec_of(pattern), n)
            step = {"kind": kind, "n": n, "pairs": pairs, **memory.predicted(pattern, backend, n)}
            total = step["predicted (B)"] + memory.copied(step)
            found.append({**step, "kept (B)": total, "peak (B)": 2 * total})
    return found


def test_the_verdict_follows_the_numbers() -> None:
    right = steps()
    report = memory.judge(right, {1})
    assert report.seen
    assert "16-fold and the other activations 4-fold" in report.finding
    assert not memory.judge([{**right[0], "kept (B)": right[0]["kept (B)"] * 2}, *right[1:]], {1}).seen
    assert not memory.judge([{**step, "peak (B)": right[0]["peak (B)"]} for step in right], {1}).seen
    assert not memory.judge(right, {1, 2}).seen
    assert len(memory.parameter_bytes()) == 1


def test_the_pairs_of_a_window_are_those_of_the_formula() -> None:
    heads, w = 4 * 2, memory.WINDOW - 1
    for step in steps():
        n = step["n"]
        per_head = n * (w + 1) - w * (w + 1) // 2 if step["kind"] == "window" else n * (n + 1) // 2
        assert step["pairs"] == heads * per_head


@pytest.mark.slow
def test_the_whole_topic_is_seen() -> None:
    report = memory.run()
    assert report.seen, report.verdict
    assert report.column("n")[:3] == [512, 1024, 2048]
