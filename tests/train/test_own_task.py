"""A task is one file: one outside the package trains, evaluates, resumes, has its own settings and leaves a model."""

import json
from pathlib import Path

import pytest

import headway
from headway.cli import run
from headway.errors import ConfigError
from headway.train import TextConfig, train
from headway.train.metrics import read_metrics
from tests.train.reversal import Reversal, ReversalConfig
from tests.train.test_resume import assert_same_bits

NAME = "tests.train.reversal:Reversal"


def test_it_trains_evaluates_and_leaves_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    arguments = ["--task", NAME, "--letters", "3", "--dtype", "fp32", "eval_every=2"]
    assert run(["train", *arguments, "--out", out, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records if "val_loss" in r] == [2, 4, 6]
    assert records[-1]["val_loss"] == result["val_loss"]
    assert {r["tokens"] for r in records if "loss" in r} == {12 * 3}
    assert len(headway.load(result["model"]).generate("abc", max_new_tokens=3).ids) <= 3
    assert run(["train", "--config", f"{out}/config.yaml", "--resume", "auto", "--steps", "8"]) == 0
    said, err = capsys.readouterr()
    assert f"next: headway generate {result['model']} abcd" in said
    assert "going on from" in err
    whole = str(tmp_path / "whole")
    assert run(["train", *arguments, "--out", whole, "--steps", "8"]) == 0
    assert_same_bits(out, whole)


def test_its_settings_are_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["train", "--task", NAME, "--help"]) == 0
    output = capsys.readouterr().out
    assert "--letters" in output
    assert "--depth" not in output
    assert run(["train", "--task", NAME, "depth=3"]) == 1
    assert "depth is a setting of task causal-lm, masked-lm, " in capsys.readouterr().err
    with pytest.raises(ConfigError, match="has settings of the class ReversalConfig, got TextConfig"):
        train(TextConfig(task=NAME, data=str(tmp_path), out=str(tmp_path / "x")), quiet=True)
    assert Reversal.settings is ReversalConfig
