"""From samples to a row: ratios within turns, shares of the limit, tolerances, and what is left out."""

import json
from dataclasses import replace

import pytest
import torch

from headway.attention import attend
from headway.patterns import Window
from headway_lab.bench import charts, rows
from headway_lab.bench import measure as measuring
from headway_lab.bench.attention import measure
from headway_lab.bench.cases import CASES, FORWARD
from headway_lab.bench.inputs import OURS, Problem
from headway_lab.bench.measure import (
    TOLERANCE,
    Effort,
    Samples,
    difference,
    drop_mismatches,
    interleave,
    mismatches,
    summarized,
)
from headway_lab.bench.rows import Row

ONCE = Effort(repeats=1, least=1, sample=0.0)
KEYS = [
    "bench",
    "case",
    "dtype",
    "ours_ms",
    "ours_gflops",
    "peers",
    "ratio_best_peer",
    "share_of_limit",
    "machine",
]


def blank(dtype: str = "float32") -> Row:
    return Row("attention", "causal n=8 forward", dtype, machine={"notes": [], "threads": 1, "cpu": "A B(1)"})


def test_sides_take_turns_that_begin_with_the_next_one() -> None:
    order: list[str] = []
    sides = {name: (lambda name=name: order.append(name)) for name in "abc"}

    def limit() -> float:
        order.append("|")
        return 1.0

    samples = interleave(sides, limit, replace(ONCE, repeats=4, least=4))
    assert "".join(order) == "aabbcc|" + "|abc|bca|cab|abc"
    assert {name: len(times) for name, times in samples.seconds.items()} == {"a": 4, "b": 4, "c": 4}
    assert samples.limit == [1.0] * 4


def test_short_calls_are_repeated_and_long_ones_take_fewer_turns() -> None:
    calls = []
    interleave({"a": lambda: calls.append(1)}, lambda: 1.0, Effort(repeats=1, least=1, sample=0.05))
    assert len(calls) > 3
    turns = interleave({"a": lambda: None}, lambda: 1.0, Effort(repeats=9, least=2, sample=0.0, seconds=0.0))
    assert len(turns.limit) == 2


def test_ratios_and_shares_are_taken_within_a_turn() -> None:
    """The machine halves its speed for two of three turns: medians of times would mix fast and slow turns."""
    samples = Samples({"ours": [1.0, 2.0, 2.0], "peer": [3.0, 6.0, 5.9]}, [10.0, 5.0, 5.0])
    assert samples.ratio("peer", "ours") == 3.0
    assert samples.share("ours", 8.0) == 0.8
    assert samples.milliseconds("ours") == 2000.0


def test_a_row_says_rates_ratios_and_shares() -> None:
    problem = Problem(
        dict.fromkeys((OURS, "sdpa", "mask", "headway causal")), 4e9, scale={"headway causal": 0.5}
    )  # type: ignore[arg-type]
    seconds = {OURS: [0.01] * 3, "sdpa": [0.02] * 3, "mask": [0.1] * 3, "headway causal": [0.018] * 3}
    row = summarized(blank(), problem, Samples(seconds, [5e11] * 3), "register peak")
    assert row.rate == pytest.approx(4e11)
    assert row.share_of_limit == pytest.approx(0.8)
    assert row.peers == pytest.approx({"sdpa": 20.0, "mask": 100.0, "headway causal": 9.0})
    assert row.ratio_best_peer == pytest.approx(2.0), "the best of the others, not headway's own other case"
    assert replace(row, ratios={"headway causal": 0.9}).ratio_best_peer == 0.9
    assert row.notes == []
    assert list(row.to_json()) == KEYS
    assert row.to_json()["ours_gflops"] == pytest.approx(400)
    moved = replace(row, bound="reads").to_json()
    assert list(moved) == [key.replace("gflops", "gbs") for key in KEYS]
    assert json.loads(row.to_line()) == row.to_json()


def test_a_peer_that_gives_another_result_is_left_out_and_told() -> None:
    x = torch.randn(2, 8)
    sides = {OURS: lambda: (x,), "sdpa": lambda: (x + 1e-3,), "mask": lambda: (x,), "own": lambda: (x * 2,)}
    problem = Problem(dict(sides), 1.0, scale={"own": 1.0})
    drop_mismatches(problem, "float32")
    assert list(problem.sides) == [OURS, "mask", "own"]
    assert "sdpa is left out: its results differ" in problem.notes[0]
    row = replace(blank(), machine={"notes": problem.notes})
    assert mismatches([blank(), row]) == [f"causal n=8 forward float32: {problem.notes[0]}"]
    nan = Problem({OURS: lambda: (x,), "sdpa": lambda: (x * float("nan"),)}, 1.0)
    drop_mismatches(nan, "float32")
    assert list(nan.sides) == [OURS]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tolerance_sees_a_window_that_is_off_by_one(dtype: str) -> None:
    q, k, v = (torch.randn(1, 1, 1536, 64).to(getattr(torch, dtype)) for _ in range(3))
    right, wrong = (attend(q, k, v, Window.last(w), backend="banded") for w in (512, 511))
    masked = attend(q, k, v, Window.last(512), backend="sdpa")
    assert difference(right, masked) < TOLERANCE[dtype] / 2
    assert difference(right, wrong) > TOLERANCE[dtype]


def test_a_case_is_measured_and_said() -> None:
    row = measure(CASES["causal"].at(32), "float32", FORWARD, "banded", ONCE)
    assert row.case == "causal n=32 forward"
    assert set(row.ratios) == {"sdpa"}
    assert row.share_of_limit is not None
    assert row.machine["backend"] == "banded"
    assert row.machine["limit_rate"] > 0
    assert row.machine["torch"] == torch.__version__


def test_what_a_backend_cannot_do_is_a_row_without_numbers() -> None:
    row = measure(CASES["global"].at(32), "float32", FORWARD, "triton", ONCE)
    assert row.ours_ms is None
    assert row.ratio_best_peer is None
    assert "not measured" in row.notes[0]
    assert "triton" in row.notes[0]
    assert json.loads(row.to_line())["ours_gflops"] is None


@pytest.mark.parametrize("bound", ["products", "reads"])
def test_a_limit_is_a_rate(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "READ_BYTES", 4 << 20)
    limit = measuring.LIMITS[bound](torch.float32)
    assert 1e6 < limit.measure() < 1e16
    assert limit.name


def test_charts_show_what_there_is(tmp_path) -> None:  # type: ignore[no-untyped-def]
    one_thread = replace(
        blank(), ours_ms=2.0, rate=1e9, share_of_limit=0.5, ratios={"sdpa": 2.0}, peers={"sdpa": 4.0}
    )
    two_threads = replace(one_thread, ours_ms=1.0, rate=2e9, machine={**one_thread.machine, "threads": 2})
    assert charts.draw([blank()], tmp_path) == []
    assert [path.name for path in charts.draw([one_thread], tmp_path)] == ["attention.png"]
    written = charts.draw([one_thread, two_threads], tmp_path)
    assert [path.name for path in written] == ["attention.png", "scaling.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_a_table_has_the_peaks_that_were_measured() -> None:
    """The peaks of a training step; without them the table has no column for them."""
    row = replace(blank(), bench="train", ours_ms=2.0, peers={"eager": 4.0})
    assert "MiB" not in rows.to_text([row])
    peaks = {"ours_mib": 1587.0, "peers_mib": {"eager": 2711.0}}
    table = rows.to_text([replace(row, extra=peaks)])
    assert "peak MiB" in table
    assert "1587" in table
    assert "eager 2711" in table
