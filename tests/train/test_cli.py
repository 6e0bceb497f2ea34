"""`headway train` and `headway eval` as a user types them."""

import json
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.cli import run
from headway.cli._options import click_command
from headway.cli.train import run as train
from headway.cli.train import with_flags
from headway.train import TextConfig, config_yaml, read_config
from headway.train.config import TrainConfig
from headway.train.metrics import Reporter
from headway.train.tasks.translation import TranslationConfig
from tests.train.test_resume import assert_same_bits

Make = Callable[..., TextConfig]


def flags(config: TextConfig, *names: str) -> list[str]:
    arguments = []
    for name in names:
        arguments += [f"--{name.replace('_', '-')}", str(getattr(config, name))]
    return arguments


@pytest.mark.parametrize("kind", [TextConfig, TranslationConfig])
def test_every_setting_is_a_flag_with_its_help(kind: type[TrainConfig]) -> None:
    options = {option.name: option for option in click_command(with_flags(train, kind)).params}
    for name, field in kind.model_fields.items():
        assert options[name].help.startswith(field.description)
        assert options[name].default is None


def test_help_has_units_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--help"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "--context TOKENS length of a training row [default: 512]" in output
    assert "(none | block | attention | feed_forward)" in output
    assert "(adamw | muon) [default: adamw]" in output


def test_print_config_is_what_runs(
    settings: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(config_yaml(settings()), encoding="utf-8")
    assert (
        run(["train", "--config", str(tmp_path / "run.yaml"), "lr=1e-4", "--no-tied", "--print-config"]) == 0
    )
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    assert read_config(tmp_path / "printed.yaml") == settings(lr=1e-4, tied=False)
    assert not Path(settings().out).exists()


def test_train_by_flags_alone_then_eval(settings: Make, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(steps=2)
    names = (
        "data",
        "vocab",
        "depth",
        "width",
        "heads",
        "kv_heads",
        "hidden",
        "patterns",
        "context",
        "batch_tokens",
    )
    arguments = [*flags(config, *names, "micro_batch", "steps", "warmup", "dtype", "out"), "--json"]
    assert run(["train", *arguments, "--validation-share", "0.2"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 2
    assert read_config(Path(config.out) / "config.yaml") == settings(
        steps=2, validation_share=0.2, task="causal-lm"
    )

    held = str(Path(config.out) / "data" / "validation.tokens")
    assert run(["eval", result["model"], "--data", held, "--dtype", "fp32", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bits_per_byte"] == pytest.approx(result["val_bits_per_byte"], rel=1e-6)
    assert report["context"] == config.context
    assert sum(p["tokens"] for p in report["positions"]) == report["tokens"]

    assert run(["eval", result["model"], "--data", config.data, "--context", "16", "--dtype", "fp32"]) == 0
    output = capsys.readouterr().out
    assert "bits per byte" in output
    assert "tokens to look back on" in output


def test_dry_run_writes_nothing(settings: Make, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings()
    arguments = flags(config, "data", "context", "batch_tokens", "steps", "out")
    assert run(["train", *arguments, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "parameters" in output
    assert "optimizer steps" in output
    assert not Path(config.out).exists()
    assert run(["train", *arguments, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["steps"] == 6
    assert plan["memory"].keys() >= {"parameters", "optimizer", "gradients", "working"}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--data", "x", "dat=1"], 1, 'unknown setting "dat" (did you mean "data"?)'),
        (["--data", "x", "lr=1", "--lr", "2"], 1, "lr is given twice"),
        (["--data", "x", "--lr", "fast"], 2, "Invalid value for '--lr'"),
        (["--datum", "x"], 2, "No such option"),
        ([], 1, "data is missing: training text"),
        (["--data", "nowhere.txt", "--out", "OUT"], 1, "nowhere.txt: no such file or folder"),
        (["--data", "nowhere.txt", "--dry-run"], 1, "nowhere.txt: no such file or folder"),
        (["--data", ".", "--dtype", "fp16", "--out", "OUT"], 1, "some 500 times slower than in bf16"),
        (["--data", "x", "--depth", "100000", "--dry-run"], 1, "depth = 100000: input should be less than"),
    ],
)
def test_wrong_usage_says_what_is_wrong(
    tmp_path: Path, arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    assert run(["train", *[out if a == "OUT" else a for a in arguments]]) == code
    assert said in capsys.readouterr().err


def test_a_stopped_run_says_how_to_resume_and_that_command_does(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is stopped after 4 of 6 steps and resumed ends with the bits of an uninterrupted run."""
    whole, stopped = settings(out=str(tmp_path / "whole")), settings(out=str(tmp_path / "a run"))
    assert run(["train", "--config", str(written(tmp_path, whole))]) == 0
    step = Reporter.step

    def stop(reporter: Reporter, record: dict[str, Any]) -> None:
        step(reporter, record)
        if record["step"] == 4:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(Reporter, "step", stop)
        assert run(["train", "--config", str(written(tmp_path, stopped))]) == 130
    stderr = capsys.readouterr().err
    assert f"saved {stopped.out}/checkpoint-4\n" in stderr
    command = stderr.partition("resume with: headway ")[2].splitlines()[0]
    assert run([*shlex.split(command), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 6
    assert_same_bits(stopped.out, whole.out)


def written(folder: Path, config: TextConfig) -> Path:
    path = folder / "settings.yaml"
    path.write_text(config_yaml(config))
    return path


def test_eval_refuses_what_it_cannot_read(
    settings: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from headway.train import train

    done = train(settings(steps=1), quiet=True)
    assert run(["eval", str(done.model), "--data", str(tmp_path / "none.txt")]) == 1
    assert "none.txt: no such file" in capsys.readouterr().err
    assert run(["eval", str(tmp_path / "none"), "--data", settings().data]) == 2
    assert "none: no such file or folder" in capsys.readouterr().err
    with pytest.warns(UserWarning, match=r"float16 on a CPU: asked for; .* several hundred times slower"):
        assert run(["eval", str(done.model), "--data", settings().data, "--dtype", "fp16"]) == 1
    assert "float16 products run hundreds of times slower than bfloat16 on a CPU" in capsys.readouterr().err


def test_the_environment_is_the_weakest_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADWAY_THREADS", "3")
    monkeypatch.setenv("HEADWAY_BACKEND", "")
    pairs = ["train", "--task", "translation", "--source", "x", "--target", "y"]
    for arguments, threads in (([], 3), (["threads=2"], 2), (["--threads", "1"], 1)):
        assert run(["train", "--data", "x", "--print-config", *arguments]) == 0
        output = capsys.readouterr().out
        assert f"threads: {threads} " in output
        assert "backend: auto " in output
        assert run([*pairs, "--print-config", *arguments]) == 0
        assert f"threads: {threads} " in capsys.readouterr().out
