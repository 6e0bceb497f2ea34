"""Processes of a run are started by the command, torchrun, SLURM or Ray Train."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.cli import run
from headway.train import TextConfig, config_yaml, train
from headway.train.start import how_to_resume, resume_command
from tests.train.test_resume import assert_same_bits

ROOT = Path(__file__).parents[2]
Make = Callable[..., TextConfig]


def ran(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=ROOT, timeout=240)


@pytest.fixture
def shared(settings: Make, tmp_path: Path) -> Path:
    """Returns the settings file of a run with two micro-batches a step, after making the same run in one process."""
    changes: dict[str, Any] = {"micro_batch": 4, "optimizer": "muon", "dropout": 0.1}
    train(settings(**changes, out=str(tmp_path / "alone")), quiet=True)
    file = tmp_path / "run.yaml"
    file.write_text(config_yaml(settings(**changes, out=str(tmp_path / "shared"))))
    return file


STARTED: dict[str, tuple[list[str], dict[str, str]]] = {
    "the command": ([sys.executable, "-m", "headway", "train", "--processes", "2", "--config", "FILE"], {}),
    "slurm": (
        ["bash", "recipes/slurm.sh", "--config", "FILE"],
        {"PROCESSES": "2", "PORT": "29611", "SLURM_JOB_NODELIST": "here", "SLURM_JOB_NUM_NODES": "1",
         "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "2"},
    ),
    "ray": ([sys.executable, "recipes/ray_train.py", "2", "FILE"], {"RAY_USAGE_STATS_ENABLED": "0"}),
}  # fmt: skip
SLURM = {"srun": 'exec "$@"', "scontrol": "echo localhost", "python": f'exec {sys.executable} "$@"'}
"""The commands of a cluster of one node, replaced by shell scripts."""


@pytest.mark.slow
@pytest.mark.parametrize("by", STARTED)
def test_processes_are_started_and_train_as_one(by: str, shared: Path) -> None:
    command, environment = STARTED[by]
    commands = shared.parent / "bin"
    commands.mkdir()
    for name, script in SLURM.items() if by == "slurm" else ():
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)
    arguments = [str(shared) if word == "FILE" else word for word in command]
    completed = ran(*arguments, PATH=f"{commands}:{os.environ['PATH']}", **environment)
    assert completed.returncode == 0, completed.stderr
    assert by == "ray" or completed.stdout.count("next: headway generate") == 1
    assert_same_bits(str(shared.parent / "shared"), str(shared.parent / "alone"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "nowhere.txt"], "data nowhere.txt: no such file or folder. Paths are relative to"),
        (["--mesh", "dp=3"], "mesh 'dp=3' needs 3 processes, but the run has 2"),
        (["--kv-heads", "3"], "1 query heads cannot share 3 key/value heads evenly"),
        (["--resume", "nowhere"], "nowhere is not a training checkpoint"),
    ],
)
def test_settings_are_looked_at_before_processes_are_started(
    arguments: list[str],
    said: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The error is printed once, and nothing is started."""
    started: list[object] = []
    monkeypatch.setattr("torch.distributed.run.run", started.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("sys.argv", ["headway", "train"])
    options = ["--data", str(corpus), "--depth", "1", "--out", str(tmp_path / "run")]
    assert run(["train", "--processes", "2", *options, *arguments]) == 1
    stderr = capfd.readouterr().err
    assert said in stderr
    assert stderr.startswith("headway: error: ")
    assert stderr.count("\n") == 1
    assert not started
    assert run(["train", "--processes", "2", *options]) == 0
    assert len(started) == 1


def test_a_run_of_several_processes_goes_on_in_as_many() -> None:
    """The mesh in its settings needs that many processes."""
    assert resume_command(Path("runs/x"), 1) == "headway train --config runs/x/config.yaml --resume auto"
    several = "headway train --processes 2 --config 'a run/config.yaml' --resume auto"
    assert resume_command(Path("a run"), 2) == several
    assert how_to_resume(Path("nowhere"), 3, 2).endswith(
        "stopped at step 3; when the cause is fixed, start again"
    )


def test_processes_that_are_started_already_are_not_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run(["train", "--processes", "2", "--data", "text/"]) == 1
    assert "--processes 2: 4 processes are started already" in capsys.readouterr().err
    recipe = str(ROOT / "recipes" / "evolution.yaml")
    assert run(["train", "--config", recipe]) == 1
    assert "a recipe of several runs, which needs a single process" in capsys.readouterr().err
