"""`headway bench attention` row by row: what is measured, in which order, and what is reported meanwhile."""

from typing import Any

import pytest
import torch

from headway.errors import BackendError
from headway_lab.bench import attention
from headway_lab.bench.cases import BOTH, FORWARD, TRAIN, Case
from headway_lab.bench.measure import Effort
from headway_lab.bench.rows import Row

ONCE = Effort(repeats=1, least=1, sample=0.0)
SHORT = Case(name="short", tokens=8, peers=("sdpa",))
ONE: dict[str, Any] = {"dtypes": ("float32",), "passes": ("forward",), "effort": ONCE}


def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(case: Case, dtype: str, direction: str, backend: str, effort: Effort) -> Row:
        return Row("attention", case.label(direction), dtype, ours_ms=2.0)

    monkeypatch.setattr(attention, "measure", row)


def test_rows_come_case_by_case(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch)
    messages: list[str] = []
    rows = list(attention.attention([SHORT], say=messages.append))
    assert [(row.case, row.dtype) for row in rows] == [
        (f"short n=8 {direction}", dtype) for dtype in BOTH for direction in (FORWARD, TRAIN)
    ]
    with pytest.raises(BackendError, match=r"unknown backend 'bandde' .*known: auto, dense"):
        next(attention.attention([SHORT], backend="bandde", say=messages.append))


def test_each_number_of_threads_is_set_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch)
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    messages: list[str] = []
    (_, _) = attention.attention([SHORT], **ONE, threads=(1, 2), say=messages.append)
    assert seen == [1, 2, 1]
    assert messages == ["short n=8 forward float32, 1 thread", "short n=8 forward float32, 2 threads"]
