"""`headway doctor` reports what is present, what is missing, and what to do."""

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import cores
from headway.attention import BACKENDS
from headway.cli import doctor, run
from headway.native import loader


def test_the_report_is_about_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_THREADS", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["torch"]["version"] == torch.__version__
    assert report["torch"]["threads"] == torch.get_num_threads()
    assert report["cpu"]["cores"] == cores.cores()
    assert report["environment"]["HEADWAY_THREADS"] == "3"
    assert report["environment"]["OMP_NUM_THREADS"] == "1"
    assert {"torch", "numpy", "tokenizers"} <= {package["name"] for package in report["packages"]}
    assert report["problems"] == []


def test_every_backend_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) == 0
    text = capsys.readouterr().out
    for name in BACKENDS:
        assert f"\n{name} " in text


def native_row(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the report on the native library and the row of its backend."""
    assert run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    return report["native"], next(row for row in report["backends"] if row["name"] == "native")


def test_native_names_its_level_and_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = loader.Library("avx2", Path("/somewhere/libheadway_avx2.so"), ctypes.CDLL(None))
    monkeypatch.setattr(loader, "search", lambda: loader.Found(library))
    native, row = native_row(capsys)
    assert row["usable"]
    assert "level avx2, in /somewhere/libheadway_avx2.so" in row["why"]
    assert (native["level"], native["path"]) == ("avx2", "/somewhere/libheadway_avx2.so")
    assert native["why_missing"] is native["trouble"] is None


def test_without_native_it_says_how_to_build_it_and_what_it_costs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loader, "search", lambda: loader.find(tmp_path, "", set()))
    native, row = native_row(capsys)
    assert not row["usable"]
    assert "sdpa and banded take over, which reach a fifth" in row["why"]
    assert f"none were built in {tmp_path}; " in row["why"]
    assert "python -m headway.native.build" in row["why"]
    assert native["level"] is native["path"] is None
    assert run(["doctor"]) == 0
    assert "advice    headway runs without its native kernels: none were built" in capsys.readouterr().out


def test_native_turned_off_is_no_advice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loader, "search", lambda: loader.find(tmp_path, "0", set()))
    native, row = native_row(capsys)
    assert "HEADWAY_NATIVE=0 turns the native kernels off; unset it" in row["why"]
    assert native["trouble"] is None


def test_a_wrong_level_is_reported_and_not_raised(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loader, "search", lambda: loader.find(tmp_path, "avx3", set()))
    native, row = native_row(capsys)
    assert not row["usable"]
    assert "HEADWAY_NATIVE=avx3 is not a level" in native["trouble"]


def test_a_missing_package_is_a_problem_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor, "requires", lambda _: ["torch>=2", "no-such-package>=1; python_version > '3'"]
    )
    assert run(["doctor"]) == 1
    assert "no-such-package is missing: pip install no-such-package" in capsys.readouterr().out


def test_advice_follows_from_the_facts() -> None:
    report = {
        "packages": [],
        "cpu": {"cores": 4, "bf16": False},
        "torch": {"threads": 8},
        "memory": {"available": 1 << 30},
        "native": {"trouble": "headway runs without its native kernels"},
    }
    problems, advice = doctor.judge(report)
    assert problems == []
    assert advice[0] == "headway runs without its native kernels"
    assert any("8 threads on 4 cores" in line for line in advice)
    assert any("no bf16" in line for line in advice)
    assert any("1.00 GiB of memory" in line for line in advice)
    good_report = {
        **report,
        "cpu": {"cores": 4, "bf16": True},
        "torch": {"threads": 4},
        "memory": {"available": 8 << 30},
        "native": {"trouble": None},
    }
    assert doctor.judge(good_report) == ([], [])
