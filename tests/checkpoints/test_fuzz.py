"""Thousands of broken checkpoints: each raises a HeadwayError that names its file, in bounded time and memory."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from headway.checkpoints.hf.layouts import LAYOUTS
from tests.checkpoints import broken_folders, fuzz


def faults(groups: str, first: int, count: int) -> list[object]:
    """Returns the faults that the fuzzer finds in a process of its own; most mutations must be refused."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.checkpoints.fuzz", groups, str(first), str(count)],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False, timeout=600,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    report = json.loads(process.stdout)
    assert list(report) == groups.split(",")
    for counts, failures in report.values():
        assert counts["refused"] > count / 2
        assert counts["refused"] + counts["loaded"] + len(failures) >= count
    return [(group, *failure) for group, (_, failures) in report.items() for failure in failures]


def test_some_broken_checkpoints_fail_well() -> None:
    """Breaks the kinds whose intact folders are quickly made; slow tests break those of every family."""
    assert faults("llama,meta,tokenizers", 0, 30) == []


@pytest.mark.slow
@pytest.mark.parametrize("group", fuzz.GROUPS)
def test_ten_thousand_broken_checkpoints_fail_well(group: str) -> None:
    assert faults(group, 1000, 1700) == []


def test_every_layout_is_broken() -> None:
    cases = (*broken_folders.ENCODERS, *broken_folders.DECODERS, *broken_folders.PAIRS)
    broken = {*broken_folders.LLAMAS, *(family for family, _, _ in cases)}
    assert broken == set(LAYOUTS), "give each family a config in tests/checkpoints/broken_folders.py"


def test_the_fuzz_sees_what_does_not_fail_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of other types, errors that name no file, endless messages and hangs must all be reported."""
    folders = fuzz.GROUPS["llama"].make(tmp_path / "whole")

    def said(load: Callable[[Path], None]) -> str:
        monkeypatch.setitem(fuzz.GROUPS, "llama", fuzz.GROUPS["llama"]._replace(load=load))
        return fuzz.fault("llama", 1, folders, tmp_path / "broken") or "nothing"

    def raises(error: BaseException) -> Callable[[Path], None]:
        def load(folder: Path) -> NoReturn:
            raise error

        return load

    target = tmp_path / "broken"
    assert said(lambda folder: None) == "nothing"
    assert said(raises(KeyError("x"))).startswith("KeyError: 'x'")
    assert said(raises(MemoryError())).startswith("MemoryError")
    assert said(raises(fuzz.HeadwayError("the config is wrong"))) == "names no file: the config is wrong"
    assert said(raises(fuzz.HeadwayError(f"{target} is wrong"))).startswith(
        "names broken and none of its files"
    )
    assert said(raises(fuzz.HeadwayError(f"{target}/config.json is wrong"))) == "nothing"
    assert said(raises(fuzz.HeadwayError(f"{target}/config.json {'x' * 9000}"))).endswith("x")

    def hangs(folder: Path) -> NoReturn:
        while True:
            pass

    monkeypatch.setattr(fuzz, "SECONDS", 0.05)
    before = fuzz.signal.signal(fuzz.signal.SIGPROF, fuzz.too_long)
    try:
        assert said(hangs).startswith("TimeoutError: more than 0.05 seconds")
    finally:
        fuzz.signal.signal(fuzz.signal.SIGPROF, before)
