"""`headway bench attention` row by row: what is said, what is left out, and the two other baselines."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from headway.errors import BackendError, BuildError
from headway_lab.bench import attention
from headway_lab.bench.cases import BOTH, FORWARD, TRAIN, Case
from headway_lab.bench.measure import Effort
from headway_lab.bench.rows import Row

ONCE = Effort(repeats=1, least=1, sample=0.0)
SHORT = Case(name="short", tokens=8, peers=("sdpa",))
ONE: dict[str, Any] = {"dtypes": ("float32",), "passes": ("forward",), "effort": ONCE}


class Runner:
    """In the place of another process: which environment it has, and what is called in it."""

    made: ClassVar[list["Runner"]] = []

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment, self.calls = environment, list[tuple[Any, ...]]()
        self.made.append(self)

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append(("ended",))

    def call(self, function: Any, *values: Any) -> Any:
        self.calls.append((function.__name__, *values))
        if function is attention.gemm_peak:
            return 9e10
        return Row(
            "attention", "case", "float32", peers={"sdpa": 1.0}, ratios={"sdpa": 0.75}, machine={"notes": []}
        )


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[Runner]:
    monkeypatch.setattr(Runner, "made", [])
    monkeypatch.setattr(attention, "SubprocessRunner", Runner)
    return Runner.made


def measured(monkeypatch: pytest.MonkeyPatch, *notes: str) -> None:
    def row(case: Case, dtype: str, direction: str, backend: str, effort: Effort) -> Row:
        ms = None if case.name == "none" else 2.0
        return Row("attention", case.label(direction), dtype, ours_ms=ms, machine={"notes": list(notes)})

    monkeypatch.setattr(attention, "measure", row)


def test_rows_come_case_by_case_and_a_note_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, "one note")
    said: list[str] = []
    rows = list(attention.attention([SHORT], tuned=False, say=said.append))
    assert [(row.case, row.dtype) for row in rows] == [
        (f"short n=8 {direction}", dtype) for dtype in BOTH for direction in (FORWARD, TRAIN)
    ]
    assert said.count("  one note") == 1
    with pytest.raises(BackendError, match=r"unknown backend 'bandde' .*known: auto, dense"):
        next(attention.attention([SHORT], backend="bandde", say=said.append))


def test_each_number_of_threads_is_set_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch)
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    said: list[str] = []
    (_, _) = attention.attention([SHORT], **ONE, threads=(1, 2), tuned=False, say=said.append)
    assert seen == [1, 2, 1]
    assert said == ["short n=8 forward float32, 1 thread", "short n=8 forward float32, 2 threads"]


def test_the_tuned_baseline_is_asked_for_the_same_row(
    monkeypatch: pytest.MonkeyPatch, others: list[Runner]
) -> None:
    measured(monkeypatch)
    monkeypatch.setattr(attention, "no_full_path", lambda: None)
    monkeypatch.setattr(attention, "full_path", lambda folder: {"LD_PRELOAD": folder.name[:14]})
    monkeypatch.setattr(attention, "gemm_peak", gemm_peak)
    said: list[str] = []
    cases = [SHORT, Case(name="none", tokens=8)]
    row, none = attention.attention(cases, **ONE, backend="banded", say=said.append)
    assert said[0] == "torch's float32 product: 45 GFLOP/s as it comes, 90 with MKL's full path"
    assert (row.ratio_best_tuned, row.machine["tuned_peers"]) == (0.75, {"sdpa": 1.0})
    assert (none.ours_ms, none.ratio_best_tuned) == (None, None), "what is not measured is not asked for"
    (runner,) = others
    assert runner.environment == {"LD_PRELOAD": "headway-bench-"}
    assert runner.calls == [
        ("gemm_peak", torch.float32),
        ("row", SHORT, "float32", "forward", "banded", ONCE),
        ("ended",),
    ]


def gemm_peak(dtype: torch.dtype) -> float:
    return 4.5e10


def test_without_that_baseline_it_is_said_why(monkeypatch: pytest.MonkeyPatch, others: list[Runner]) -> None:
    measured(monkeypatch)
    monkeypatch.setattr(attention, "no_full_path", lambda: "it is not here")
    said: list[str] = []
    (row,) = attention.attention([SHORT], **ONE, say=said.append)
    assert said[0] == "no tuned baseline: it is not here"
    assert (row.ratio_best_tuned, others) == (None, [])


def test_the_line_that_is_loaded_first_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        attention.subprocess, "run", lambda command, **options: asked.append((command, options))
    )
    monkeypatch.setattr(attention, "compiler", lambda: ["g++", "-m64"])
    monkeypatch.setenv("LD_PRELOAD", "before.so")
    assert attention.full_path(tmp_path) == {"LD_PRELOAD": f"{tmp_path / 'shim.so'} before.so"}
    ((command, options),) = asked
    assert command == [
        *["g++", "-m64", "-shared", "-fPIC", "-O1", "-x", "c++", "-", "-o"],
        str(tmp_path / "shim.so"),
    ]
    assert options == {"input": attention.SHIM.encode(), "check": True, "capture_output": True}
    monkeypatch.delenv("LD_PRELOAD")
    assert attention.full_path(tmp_path) == {"LD_PRELOAD": str(tmp_path / "shim.so")}


def missing() -> list[str]:
    raise BuildError("no C++ compiler")


def test_the_other_baseline_says_why_it_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.sys, "platform", "linux")
    monkeypatch.setattr(attention.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(attention.torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(attention, "cpu_vendor", lambda: "GenuineIntel")
    assert "Intel" in str(attention.no_full_path())
    monkeypatch.setattr(attention, "cpu_vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(attention, "compiler", lambda: ["g++"])
    assert attention.no_full_path() is None
    monkeypatch.setattr(attention, "compiler", missing)
    assert attention.no_full_path() == "no C++ compiler"
    monkeypatch.setattr(attention.torch.backends.mkl, "is_available", lambda: False)
    assert "no MKL" in str(attention.no_full_path())
    monkeypatch.setattr(attention.platform, "machine", lambda: "aarch64")
    assert "x86-64" in str(attention.no_full_path())
