"""Numbers as text and as JSON."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.cli._shared import print_json
from headway.report import cell, duration, operations, plain, size, table

SECONDS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "\u00b5s": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Point:
    x: float
    where: Path


def test_a_table_aligns_numbers_right_and_words_left() -> None:
    text = table(("name", "count"), [("ring", 12), ("growing", 1234567)], indent="")
    assert text.splitlines() == [
        "name         count",
        "-------  ---------",
        "ring            12",
        "growing  1 234 567",
    ]


def test_cells_are_short_and_true() -> None:
    values = [0.0, 1234.5, 0.00001234, 5, True, None, "x", float("inf"), -2.5e9]
    assert [cell(v) for v in values] == ["0", "1234", "1.23e-05", "5", "yes", "", "x", "inf", "-2.50e+09"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-3, "0.001"), (9.99e-4, "9.99e-04"), (-9.99e-4, "-9.99e-04"), (999_999.0, "1e+06"), (1e6, "1.00e+06"),
        (123456.0, "1.235e+05"), (0.12345, "0.1235"), (-3, "-3"), (1000, "1 000"), (-1234567, "-1 234 567"),
        (False, "no"), (float("nan"), "nan"), (-0.0, "-0"), (Path("a/b"), "a/b"), ("", ""),
    ],
)  # fmt: skip
def test_a_cell_has_four_digits_up_to_a_million(value: object, text: str) -> None:
    assert cell(value) == text


def test_a_column_is_one_of_numbers_if_all_of_it_is() -> None:
    """Cells without a value count as numbers; columns are as wide as their widest cell, or their name."""
    rows = [(None, 1.5, "a", -2), (12345, None, 7, None)]
    assert table(("count", "x", "mixed", "n"), rows).splitlines() == [
        "   count    x  mixed   n",
        "  ------  ---  -----  --",
        "          1.5  a      -2",
        "  12 345       7",
    ]
    assert table(("a", "b"), []) == "  a  b\n  -  -"


def test_sizes_have_units() -> None:
    assert [size(n) for n in (0, 1023, 1023.6, 1024, 1048575, 1536 << 10, 3 << 30, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.00 KiB",
        "1.00 MiB",
        "1.50 MiB",
        "3.00 GiB",
        "5.00 TiB",
    ]


def test_json_understands_what_reports_hold(capsys) -> None:  # type: ignore[no-untyped-def]
    value = {
        "p": Point(float("nan"), Path("a/b")),
        1: (np.float32(0.5), torch.tensor(3), {2}),
        "inf": float("inf"),
    }
    assert plain([True, None, Path("x/y"), (n for n in (1, 2.5)), range(2), torch.zeros(1, 2), -math.inf]) == [
        True, None, "x/y", [1, 2.5], [0, 1], [[0.0, 0.0]], None,
    ]  # fmt: skip
    assert plain(Point) == str(Point), "a class is no value of its own"
    assert plain(value) == {"p": {"x": None, "where": "a/b"}, "1": [0.5, 3, [2]], "inf": None}
    print_json(value)
    assert json.loads(capsys.readouterr().out) == plain(value)


def test_durations_and_operations_have_units() -> None:
    durations = [13860.0, 725.0, 59.4, 4.2, 0.035, 2.5e-5, 3e-8, 180000.0, 3600.0]
    expected = [
        "3 h 51 min",
        "12 min 5 s",
        "59.4 s",
        "4.2 s",
        "35 ms",
        "25 \u00b5s",
        "30 ns",
        "2 d 2 h",
        "1 h",
    ]
    assert [duration(seconds) for seconds in durations] == expected
    assert [operations(n) for n in (12.0, 999.0, 999.9, 2.8e15, 3.14e9, 4e18, 0)] == [
        "12 FLOP", "999 FLOP", "1 kFLOP", "2.8 PFLOP", "3.14 GFLOP", "4 EFLOP", "0 FLOP",
    ]  # fmt: skip


@given(st.floats(1e-8, 1e7))
def test_a_duration_says_the_seconds_within_one_percent(seconds: float) -> None:
    parts = re.findall(r"([0-9.e+]+) (d|h|min|s|ms|\u00b5s|ns)(?: |$)", duration(seconds))
    assert sum(float(number) * SECONDS[unit] for number, unit in parts) == pytest.approx(seconds, rel=0.01)
