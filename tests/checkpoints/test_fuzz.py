"""Thousands of broken checkpoints: each raises a HeadwayError that names its file, in bounded time, text and memory."""

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
    """Runs in a process of its own, whose address space may grow by `fuzz.MEMORY`; most mutations must be refused."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.checkpoints.fuzz", groups, str(first), str(count)],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert list(said) == groups.split(",")
    for seen, found in said.values():
        assert seen["refused"] > count / 2
        assert seen["refused"] + seen["loaded"] + len(found) >= count
    return [(group, *one) for group, (_, found) in said.items() for one in found]


def test_some_broken_checkpoints_fail_well() -> None:
    """Of the kinds whose whole folders are soon made; slow tests break those of every family."""
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
    """Another error than ours, silence on the file, an endless text and a hang are all reported."""
    folders = fuzz.GROUPS["llama"].make(tmp_path / "whole")

    def said(load: Callable[[Path], None]) -> str:
        monkeypatch.setitem(fuzz.GROUPS, "llama", fuzz.GROUPS["llama"]._replace(load=load))
        return fuzz.fault("llama", 1, folders, tmp_path / "broken") or "nothing"

    def raises(error: BaseException) -> Callable[[Path], None]:
        def load(folder: Path) -> NoReturn:
            raise error

        return load

    there = tmp_path / "broken"
    assert said(lambda folder: None) == "nothing"
    assert said(raises(KeyError("x"))).startswith("KeyError: 'x'")
    assert said(raises(MemoryError())).startswith("MemoryError")
    assert said(raises(fuzz.HeadwayError("the config is wrong"))) == "names no file: the config is wrong"
    assert said(raises(fuzz.HeadwayError(f"{there} is wrong"))).startswith(
        "names broken and none of its files"
    )
    assert said(raises(fuzz.HeadwayError(f"{there}/config.json is wrong"))) == "nothing"
    assert said(raises(fuzz.HeadwayError(f"{there}/config.json {'x' * 9000}"))).endswith("x")

    def hangs(folder: Path) -> NoReturn:
        while True:
            pass

    monkeypatch.setattr(fuzz, "SECONDS", 0.05)
    before = fuzz.signal.signal(fuzz.signal.SIGPROF, fuzz.too_long)
    try:
        assert said(hangs).startswith("TimeoutError: more than 0.05 seconds")
    finally:
        fuzz.signal.signal(fuzz.signal.SIGPROF, before)
