"""A task is one file: one that is no part of the package trains, evaluates, goes on to the bit, and leaves a model."""

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
    given = ["--task", NAME, "--letters", "3", "--dtype", "fp32", "eval_every=2"]
    assert run(["train", *given, "--out", out, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records if "val_loss" in r] == [2, 4, 6]
    assert records[-1]["val_loss"] == found["val_loss"]
    assert {r["tokens"] for r in records if "loss" in r} == {12 * 3}
    assert len(headway.load(found["model"]).generate("abc", max_new_tokens=3).ids) <= 3
    assert run(["train", "--config", f"{out}/config.yaml", "--resume", "auto", "--steps", "8"]) == 0
    said, err = capsys.readouterr()
    assert f"next: headway generate {found['model']} abcd" in said
    assert "going on from" in err
    whole = str(tmp_path / "whole")
    assert run(["train", *given, "--out", whole, "--steps", "8"]) == 0
    assert_same_bits(out, whole)


def test_its_settings_are_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["train", "--task", NAME, "--help"]) == 0
    said = capsys.readouterr().out
    assert "--letters" in said
    assert "--depth" not in said
    assert run(["train", "--task", NAME, "depth=3"]) == 1
    assert "depth is a setting of task causal-lm, masked-lm, " in capsys.readouterr().err
    with pytest.raises(ConfigError, match="has settings of the class ReversalConfig, got TextConfig"):
        train(TextConfig(task=NAME, data=str(tmp_path), out=str(tmp_path / "x")), quiet=True)
    assert Reversal.settings is ReversalConfig
