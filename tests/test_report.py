"""Numbers as text and as JSON."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headway.cli._shared import print_json
from headway.report import cell, plain, size, table


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
    given = [0.0, 1234.5, 0.00001234, 5, True, None, "x", float("inf"), -2.5e9]
    assert [cell(v) for v in given] == ["0", "1234", "1.23e-05", "5", "yes", "", "x", "inf", "-2.50e+09"]


def test_sizes_have_units() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1536 << 10, 3 << 30, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
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
    assert plain(value) == {"p": {"x": None, "where": "a/b"}, "1": [0.5, 3, [2]], "inf": None}
    print_json(value)
    assert json.loads(capsys.readouterr().out) == plain(value)
