"""What the bench measures, asks for and prints where the time of a call and the limits of the machine are given."""

import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from headway_lab.bench import attention, charts, measure, peers
from headway_lab.bench.measure import Limit
from headway_lab.bench.rows import Row, to_text
from tests import figures, listings
from tests.listings import Clock, number

LISTINGS = Path(__file__).parent / "listings"
HERE = ("backend", "limit", "limit_rate", "notes", "threads", "turns")
"""Of what a row says of the machine, what does not depend on it."""


def steady(patch: pytest.MonkeyPatch) -> None:
    """Every call takes some milliseconds, the same in every run; the limits are round; of several forms the first is
    the fastest."""

    def limit(bound: str, dtype: torch.dtype) -> Limit:
        return Limit(f"{bound} in {dtype}", lambda: {"reads": 2e9, "products": 4e10}[bound])

    patch.setattr(time, "perf_counter", Clock())
    patch.setattr(measure, "LIMITS", {bound: partial(limit, bound) for bound in measure.LIMITS})
    for module in (attention, peers):
        patch.setattr(module, "fastest", lambda calls, run: calls[0])


def check(name: str, lines: Iterable[str]) -> None:
    """That a listing of the bench is what is kept."""
    listings.check(LISTINGS / f"{name}.txt", "\n".join(lines))


def rows_of(rows: Iterable[Row]) -> Iterator[str]:
    """Every number of a row; then the table, without its line on the machine."""
    rows = list(rows)
    for row in rows:
        facts = row.to_json()
        facts["machine"] = {name: value for name, value in row.machine.items() if name in HERE}
        yield row.summary()
        yield from (f"  {name} = {shown(value)}" for name, value in facts.items())
    plain = [row for row in to_text(rows).splitlines() if "native kernels: " not in row]
    yield from ("", *plain, "")


def shown(value: Any) -> str:
    """Values of JSON as text, numbers to four digits."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {shown(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(shown, value)) + "]"
    return number(value)


def drawn(rows: list[Row], patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every chart of these rows."""
    found: list[str] = []
    patch.setattr(charts, "saved_figure", partial(figures.kept, found))
    charts.draw(rows, Path("out"))
    yield from found
