"""Numbers as people read them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.report import duration, operations

SECONDS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "\u00b5s": 1e-6, "ns": 1e-9}


def test_durations_and_operations_have_units() -> None:
    given = [13860.0, 725.0, 59.4, 4.2, 0.035, 2.5e-5, 3e-8, 180000.0, 3600.0]
    wanted = ["3 h 51 min", "12 min 5 s", "59.4 s", "4.2 s", "35 ms", "25 \u00b5s", "30 ns", "2 d 2 h", "1 h"]
    assert [duration(seconds) for seconds in given] == wanted
    assert [operations(n) for n in (12.0, 999.0, 999.9, 2.8e15, 3.14e9, 4e18, 0)] == [
        "12 FLOP", "999 FLOP", "1 kFLOP", "2.8 PFLOP", "3.14 GFLOP", "4 EFLOP", "0 FLOP",
    ]  # fmt: skip


@given(st.floats(1e-8, 1e7))
def test_a_duration_says_the_seconds_within_one_percent(seconds: float) -> None:
    parts = re.findall(r"([0-9.e+]+) (d|h|min|s|ms|\u00b5s|ns)(?: |$)", duration(seconds))
    assert sum(float(number) * SECONDS[unit] for number, unit in parts) == pytest.approx(seconds, rel=0.01)
