"""Only the main process prints: `headway train` when torchrun has started it."""

from pathlib import Path
from typing import Any

import pytest

import headway.hardware
import headway.train
from headway.cli import run
from headway.train import Interrupted, TextConfig


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """Replaces training by a function that records its arguments and stops at once; returns the records."""
    calls: list[tuple[Any, str]] = []

    def stopped(config: TextConfig, *, resume: str) -> None:
        calls.append((config, resume))
        raise Interrupted(Path("out/checkpoint-7"))

    monkeypatch.setattr(headway.train, "train", stopped)
    monkeypatch.setattr(headway.hardware, "keep_freed_memory", lambda: True)
    return calls


@pytest.mark.parametrize(("rank", "speaks"), [(None, True), ("0", True), ("1", False)])
@pytest.mark.parametrize(("world", "processes"), [(None, ""), ("2", "--processes 2 ")])
def test_the_main_process_says_how_to_resume(
    started: list[tuple[Any, str]],
    rank: str | None,
    speaks: bool,
    world: str | None,
    processes: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert run(["train", "--data", "x", "--out", "out", "--resume", "never"]) == 130
    ((config, resume),) = started
    assert (config.out, resume) == ("out", "never")
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == speaks * (
        "saved out/checkpoint-7\n"
        f"resume with: headway train {processes}--config out/config.yaml --resume auto\n"
    )


def test_another_number_of_processes_than_was_started_is_refused(
    started: list[tuple[Any, str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert run(["train", "--data", "x", "--processes", "3"]) == 1
    assert (
        "--processes 3: 2 processes are started already (by torchrun); leave it out"
        in capsys.readouterr().err
    )
    assert not started
    assert run(["train", "--data", "x", "--processes", "2"]) == 130
    assert len(started) == 1


@pytest.mark.parametrize("flag", ["--print-config", "--dry-run"])
def test_a_recipe_is_run_and_not_described(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("stages: {}\n")
    assert run(["train", "--config", str(recipe), flag]) == 1
    stderr = " ".join(capsys.readouterr().err.split())
    assert "is a recipe of several runs; --print-config and --dry-run are for one run" in stderr
    assert run(["train", "--config", str(recipe), "--processes", "2"]) == 1
    stderr = " ".join(capsys.readouterr().err.split())
    assert "is a recipe of several runs, which needs a single process; leave out --processes" in stderr
