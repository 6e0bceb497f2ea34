"""Thousands of broken checkpoints: each raises a HeadwayError that names its file, in bounded time, text and memory."""

import json
import os
import subprocess
import sys

import pytest

from headway.checkpoints import load_model
from tests.checkpoints import fuzz


def faults(first: int, count: int) -> list[list]:
    """Runs in a process of its own, whose address space may grow by `fuzz.MEMORY`."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.checkpoints.fuzz", str(first), str(count)],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_few_hundred_broken_checkpoints_fail_well():
    assert faults(0, 240) == []


@pytest.mark.slow
def test_ten_thousand_broken_checkpoints_fail_well():
    assert faults(1000, 10_000) == []


def test_the_fuzz_sees_what_does_not_fail_well(tmp_path, monkeypatch):
    """Most mutations are refused; and another error than ours, silence on the file, and a hang are all reported."""
    folders = fuzz.whole_folders(tmp_path)
    refused = 0

    def counted(folder):
        nonlocal refused
        refused += 1
        load_model(folder)
        refused -= 1

    monkeypatch.setattr(fuzz, "load_model", counted)
    seeds = [seed for seed in range(40) if seed % 16]
    assert all(fuzz.fault(seed, folders, tmp_path / "broken") is None for seed in seeds)
    assert refused > len(seeds) / 2

    def raises(error):
        def load(folder):
            raise error

        monkeypatch.setattr(fuzz, "load_model", load)
        return fuzz.fault(1, folders, tmp_path / "broken")

    assert raises(KeyError("x")).startswith("KeyError: 'x'")
    assert raises(MemoryError()).startswith("MemoryError")
    assert raises(fuzz.HeadwayError("the config is wrong")) == "names no file: the config is wrong"
    assert raises(fuzz.HeadwayError(f"{tmp_path / 'broken'} {'x' * 9000}")).endswith("x")
