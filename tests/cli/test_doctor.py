"""`headway doctor` says what is here, what is not, and what to do."""

import json

import pytest
import torch

from headway import hardware
from headway.attention import ABILITIES
from headway.cli import doctor, run


def test_the_report_is_about_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_THREADS", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["torch"]["version"] == torch.__version__
    assert report["torch"]["threads"] == torch.get_num_threads()
    assert report["cpu"]["cores"] == hardware.cores()
    assert report["cpu"]["level"] == hardware.cpu_level()
    assert report["environment"]["HEADWAY_THREADS"] == "3"
    assert report["environment"]["OMP_NUM_THREADS"] == "1"
    assert {"torch", "safetensors", "tokenizers"} <= {package["name"] for package in report["packages"]}
    assert report["problems"] == []


def test_every_backend_is_listed_and_native_says_what_takes_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) == 0
    text = capsys.readouterr().out
    for name in (*ABILITIES, "native", "flex"):
        assert name in text
    assert "banded take over" in text


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
    }
    problems, advice = doctor.judge(report)
    assert problems == []
    assert any("8 threads on 4 cores" in line for line in advice)
    assert any("no bf16" in line for line in advice)
    assert any("1.00 GiB of memory" in line for line in advice)
    calm = {
        **report,
        "cpu": {"cores": 4, "bf16": True},
        "torch": {"threads": 4},
        "memory": {"available": 8 << 30},
    }
    assert doctor.judge(calm) == ([], [])
