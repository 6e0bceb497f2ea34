"""Settings: where they come from, which are refused, and with which messages."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from headway.errors import ConfigError
from headway.nn.block import CHECKPOINTING
from headway.train import TextConfig, config_yaml, read_config


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"batch_tokns": 8}, 'unknown setting "batch_tokns" (did you mean "batch_tokens"?)'),
        ({"learning_rate": 1e-3}, '"learning_rate" (here it is "lr": peak learning rate'),
        ({"lr": -1.0}, "lr = -1.0: input should be greater than 0"),
        ({"context": "long"}, "context = 'long': input should be a valid integer"),
        ({"context": 1}, "context = 1: input should be greater than or equal to 2 (tokens)"),
        ({"steps": 5, "epochs": 1}, "steps and epochs each set the length of the run"),
        ({"context": 512, "batch_tokens": 100}, "batch_tokens 100 holds no row of context 512; raise it to"),
        ({"micro_batch": 99}, "micro_batch 99 is more than the 16 rows of a step"),
        ({"model": "llama-2-7b", "depth": 4}, "model 'llama-2-7b' already fixes depth"),
        ({"model": "m", "vocab": 999, "units": "words"}, "vocab and units: only for training a tokenizer"),
        ({"tokenizer": "t", "vocab": 999}, "vocab is the size of a tokenizer to be trained"),
        ({"validation": "v", "validation_share": 0.1}, "both say what is held out"),
        ({"matrix_lr": 0.1}, "matrix_lr is Muon's learning rate, but optimizer is adamw"),
        ({"sample_every": 3}, "sample_every is given without sample_prompts"),
        ({"optimizer": "sgd"}, "optimizer = 'sgd': input should be 'adamw' or 'muon'"),
    ],
)  # fmt: skip
def test_a_bad_setting_is_named(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        TextConfig.of({"data": "x", **values}, where="run.yaml")
    assert str(caught.value).startswith("run.yaml: ")


def test_what_is_missing_is_described() -> None:
    with pytest.raises(ConfigError, match="data is missing: training text: a text file, records"):
        TextConfig.of({})


def test_yaml_round_trip_keeps_every_setting(tmp_path: Path) -> None:
    config = TextConfig.of(
        {
            "data": "a: b # c",
            "patterns": "Window.last(4) | Sink(1) & Causal(); Causal()",
            "sample_prompts": ["x: y", "# z", "ü\n"],
            "lr": "1e-3",
            "clip": "inf",
            "tied": False,
        }
    )
    (tmp_path / "run.yaml").write_text(config_yaml(config), encoding="utf-8")
    assert read_config(tmp_path / "run.yaml") == config
    for name, field in TextConfig.model_fields.items():
        assert f"{name}: " in config_yaml(config)
        assert field.description in config_yaml(config)


def test_later_sources_win(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: x\nlr: 1e-2\nsteps: 7\n")
    config = read_config(path, ["lr=1e-3", "patterns=Causal()"], {"steps": 9})
    assert (config.lr, config.steps, config.patterns) == (1e-3, 9, "Causal()")


@pytest.mark.parametrize(
    ("text", "overrides", "flags", "said"),
    [
        ("- a\n", [], {}, "must hold `name: value` lines, but holds a list"),
        ("a: [1\n", [], {}, "is not YAML"),
        ("data: x\n", ["lr"], {}, "'lr' is not an override; write key=value"),
        ("data: x\n", ["lr=1", "lr=2"], {}, "lr is given twice"),
        ("data: x\n", ["lr=1"], {"lr": 2.0}, "lr is given twice: as lr=... and as a flag"),
    ],
)
def test_bad_sources_are_named(
    tmp_path: Path, text: str, overrides: list[str], flags: dict[str, object], said: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_config(path, overrides, flags)


def test_what_may_be_computed_again_is_what_blocks_know() -> None:
    assert get_args(TextConfig.model_fields["gradient_checkpointing"].annotation) == CHECKPOINTING


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the settings .*none\.yaml: No such file"):
        read_config(tmp_path / "none.yaml")


def test_settings_import_no_torch() -> None:
    code = "import sys, headway.train as t; t.TextConfig(data='x'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_path_below_the_home_folder_is_what_a_shell_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = read_config(None, ["data=~/texts"], {"out": "~/runs/a"})
    assert (config.data, config.out) == (f"{tmp_path}/texts", f"{tmp_path}/runs/a")
