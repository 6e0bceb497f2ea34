"""What the bench measures, requests and prints, with given times of calls and given limits of the machine."""

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
"""What a row says of the machine and does not depend on it."""


def steady(patch: pytest.MonkeyPatch) -> None:
    """Patches the bench: every call takes some milliseconds, the same in every run; the limits are round; the first of
    several forms is the fastest."""

    def limit(bound: str, dtype: torch.dtype) -> Limit:
        return Limit(f"{bound} in {dtype}", lambda: {"reads": 2e9, "products": 4e10}[bound])

    patch.setattr(time, "perf_counter", Clock())
    patch.setattr(measure, "LIMITS", {bound: partial(limit, bound) for bound in measure.LIMITS})
    for module in (attention, peers):
        patch.setattr(module, "fastest", lambda calls, run: calls[0])


def check(name: str, lines: Iterable[str]) -> None:
    """Compares a listing of the bench with the kept one."""
    listings.check(LISTINGS / f"{name}.txt", "\n".join(lines))


def rows_of(rows: Iterable[Row]) -> Iterator[str]:
    """Yields every number of each row, then the table, without its line on the machine."""
    rows = list(rows)
    for row in rows:
        facts = row.to_json()
        facts["machine"] = {name: value for name, value in row.machine.items() if name in HERE}
        yield row.summary()
        yield from (f"  {name} = {shown(value)}" for name, value in facts.items())
    plain = [row for row in to_text(rows).splitlines() if "native kernels: " not in row]
    yield from ("", *plain, "")


def shown(value: Any) -> str:
    """Returns a JSON value as text, with numbers to four digits."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {shown(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(shown, value)) + "]"
    return number(value)


def drawn(rows: list[Row], patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yields every chart of these rows."""
    lines: list[str] = []
    patch.setattr(charts, "saved_figure", partial(figures.kept, lines))
    charts.draw(rows, Path("out"))
    yield from lines
