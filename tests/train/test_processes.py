"""Several processes that share the micro-batches of each step train as one process does, bit for bit."""

import json
import math
import os
import random
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.parallel import Mesh
from headway.train import TextConfig, train
from headway.train.checkpoint import checkpoints, step_of
from headway.train.config import TrainConfig
from headway.train.lock import LOCK
from headway.train.metrics import read_metrics
from headway.train.microbatch_pool import MasterWeights
from tests.train.conftest import documents
from tests.train.processes import ended, soon, start, together
from tests.train.test_resume import (
    assert_same_bits,
    in_a_child,
    killed_at_disk_call,
    killed_at_micro_batch,
    lines,
)
from tests.train.translation import config as translation

Make = Callable[..., TextConfig]
HALVES: dict[str, Any] = {"micro_batch": 4, "steps": 20, "clip": 0.3, "dropout": 0.1}
"""Two micro-batches a step, as a step has 8 rows."""


def as_one(
    config: TrainConfig, folder: Path, ranks: int = 2, mesh: str | None = None, other: str | None = None
) -> None:
    """Asserts that the run by the processes of a mesh, and the run in one process or by the processes of the mesh
    `other`, have equal weights, moments and log lines."""
    runs = []
    for name, mesh_name, count in (("alone", other, 1), ("shared", mesh, ranks)):
        run = config.model_copy(update={"mesh": mesh_name, "out": str(folder / name)})
        count = count if mesh_name is None else Mesh.read(mesh_name).ranks
        together(count, lambda rank: train(run), folder / f"said {name}")  # noqa: B023
        runs.append(run.out)
    assert_same_bits(*reversed(runs))
    held = [[r for r in read_metrics(Path(out) / "metrics.jsonl") if "val_loss" in r] for out in runs]
    assert held[0] == held[1]


def test_row_45_two_processes_are_one(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Muon and AdamW, clipping, dropout, documents of all lengths and held-out text in several batches; the last
    step has one micro-batch."""
    monkeypatch.setattr("headway.train.evaluation.BATCH_TOKENS", 4 * 24)
    as_one(settings(**HALVES, optimizer="muon", validation_share=0.3, eval_every=9), tmp_path)


# --- processes that are killed, hang or fail


@pytest.mark.slow
def test_killed_and_resumed_by_one_and_by_two(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is killed in a step, then rank 0 while it saves; the other rank names the dead one and how to resume."""
    monkeypatch.setattr("headway.parallel.roll.SILENCE", 1.5)
    whole = settings(**HALVES | {"steps": 6}, optimizer="muon", out=str(tmp_path / "whole"))
    config = whole.model_copy(update={"out": str(tmp_path / "killed"), "save_every": 2})
    train(whole, quiet=True)

    def one_dies(rank: int) -> None:
        (killed_at_micro_batch(config, 4) if rank == 1 else lambda: train(config, resume="auto"))()

    def main_dies(rank: int) -> None:
        (
            killed_at_disk_call(config, "checkpoint-4", 9)
            if rank == 0
            else lambda: train(config, resume="auto")
        )()

    first_logs, second_logs = tmp_path / "one", tmp_path / "two"
    children = start(2, one_dies, first_logs)
    assert ended(children) == [1, -signal.SIGKILL]
    stderr = (first_logs / "0").read_text()
    assert f"RankError: rank 1 (process {children[1]} on host" in stderr
    assert "is gone: its heartbeat stopped, so it was killed" in stderr
    settings_file = shlex.quote(f"{config.out}/config.yaml")
    assert (
        f"resume from {config.out}/checkpoint-2: headway train --processes 2 --config {settings_file} --resume auto"
        in stderr
    )
    assert checkpoints(Path(config.out))[-1].name == "checkpoint-2"
    assert ended(start(2, main_dies, second_logs)) == [-signal.SIGKILL, 1]
    assert (
        "RankError: rank 0, or the process that started the run, is gone" in (second_logs / "1").read_text()
    )
    assert checkpoints(Path(config.out))[-1].name == "checkpoint-2"
    assert in_a_child(killed_at_micro_batch(config, 5)) == -signal.SIGKILL  # alone, for two steps
    assert checkpoints(Path(config.out))[-1].name == "checkpoint-4"
    together(2, lambda rank: train(config, resume="auto"), tmp_path / "three")
    assert "not bit for bit" not in (tmp_path / "three" / "0").read_text()
    assert_same_bits(config.out, whole.out)


@pytest.mark.slow
def test_killed_at_ten_random_moments(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.parallel.roll.SILENCE", 1.5)
    # After some of the ten kills no rank sends to the dead one, and only this limit ends the others.
    monkeypatch.setattr("headway.parallel.roll.LOST", 20.0)
    killed_at_ten_moments(settings, tmp_path)


def killed_at_ten_moments(
    settings: Make, tmp_path: Path, look: Callable[[Path], object] = lambda checkpoint: None, **changes: Any
) -> None:
    """Kills a rank of a run with `changes` ten times, each up to two saves after the last kill and up to two steps
    later: in preparations, steps and saves. Asserts that it ends with the bits of an uninterrupted run (of one process,
    unless tensor parallelism rounds sums otherwise), and calls `look` with each checkpoint after each kill."""
    mesh = Mesh.read(changes.get("mesh", "dp=2"))
    whole = settings(**HALVES | {"steps": 40}, kv_heads=mesh.tp, save_every=1, out=str(tmp_path / "whole"))
    config = whole.model_copy(update={"out": str(tmp_path / "killed"), **changes})
    out, logs, rng = Path(config.out), tmp_path / "said", random.Random(0)
    if mesh.tp == 1:
        train(whole, quiet=True)
    else:
        alike = whole.model_copy(update=changes)
        together(mesh.ranks, lambda rank: train(alike), logs)
    step = min(0.1, read_metrics(Path(whole.out) / "metrics.jsonl")[-1]["seconds"] / 40)

    def saved() -> int:
        return max(map(step_of, checkpoints(out)), default=-1)

    for _ in range(10):
        victim, goal = rng.randrange(mesh.ranks), saved() + rng.randrange(3)
        children = start(mesh.ranks, lambda rank: train(config, resume="auto"), logs)
        soon(lambda: (out / LOCK).exists() and saved() >= goal, children)  # noqa: B023
        time.sleep(rng.uniform(0.0, 2.0) * step)
        os.kill(children[victim], signal.SIGKILL)
        codes = ended(children)
        outputs = [(logs / str(rank)).read_text() for rank in range(mesh.ranks)]
        expected_codes = [-signal.SIGKILL if rank == victim else 1 for rank in range(mesh.ranks)]
        for rank in range(mesh.ranks):
            if codes[rank] != expected_codes[rank]:
                # pytest would cut the message
                print(f"rank {rank} ended with {codes[rank]}:\n{outputs[rank]}")
        assert codes == expected_codes
        for rank in {*range(mesh.ranks)} - {victim}:
            assert f"RankError: rank {victim}" in outputs[rank], f"rank {rank}, of {victim}: {outputs[rank]}"
        (out / LOCK).unlink(missing_ok=True)
        for path in checkpoints(out):
            look(path)
    together(mesh.ranks, lambda rank: train(config, resume="auto"), logs)
    assert_same_bits(config.out, whole.out)


@pytest.mark.slow
def test_a_process_that_hangs_is_named(settings: Make, tmp_path: Path) -> None:
    config = settings(micro_batch=4, patience=10.0)

    def hangs(rank: int) -> None:
        if rank == 1:
            plain_collect = MasterWeights.collect

            def collect(weights: MasterWeights[Any]) -> None:
                plain_collect(weights)
                time.sleep(600)

            MasterWeights.collect = collect  # type: ignore[method-assign]
        train(config)

    children = start(2, hangs, tmp_path / "said")
    deadline = time.monotonic() + 60
    while os.waitpid(children[0], os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(children[1], signal.SIGKILL)
    os.waitpid(children[1], 0)
    stderr = (tmp_path / "said" / "0").read_text()
    assert f"RankError: rank 1 (process {children[1]} on host" in stderr
    assert "hangs: it is alive, but did not reach" in stderr


def test_what_cannot_be_shared_is_refused(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One micro-batch a step, data that differs from rank 0's, and an error of the main process end both processes."""
    monkeypatch.setattr("headway.parallel.roll.SILENCE", 1.5)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(1, 60)))

    def refused(config: TextConfig, other_config: TextConfig | None = None) -> list[str]:
        logs = tmp_path / "said"
        assert ended(
            start(2, lambda rank: train(other_config if other_config and rank else config), logs)
        ) == [1, 1]
        return [(logs / str(rank)).read_text() for rank in (0, 1)]

    for stderr in refused(settings(micro_batch=8)):
        assert "ConfigError: 2 processes share the micro batches of a step, but a step has only 1" in stderr
    for stderr in refused(settings(), settings(data=str(other), out=str(tmp_path / "b"))):
        assert "ConfigError: the processes have read different data: rank 0 has" in stderr
    (tmp_path / "none.jsonl").write_text("\n")
    main_stderr, other_stderr = refused(settings(data=str(tmp_path / "none.jsonl")))
    assert "none.jsonl: no records" in main_stderr
    assert "RankError: rank 0" in other_stderr
    assert "none.jsonl: no records" in other_stderr
    for stderr in refused(settings(mesh="dp=3")):
        assert "ConfigError: mesh 'dp=3' needs 3 processes, but the run has 2" in stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=2,pd=2", r"'pd=2' is not axis=size .*; axes are dp, fsdp, expert, cp and tp, each at most once"),
        ("dp=2,dp=2", "'dp=2' is not axis=size"),
        ("dp=0", "'dp=0' is not axis=size"),
        ("dp", "'dp' is not axis=size"),
        ("dp=2,cp=3", "needs 6 processes, but the run has 4; start 6"),
    ],
)
def test_a_mesh_that_is_none_of_four_processes_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mesh.of(text, 4)


def test_a_mesh_is_of_as_many_processes_as_there_are() -> None:
    assert Mesh.of("cp=2, dp=2", 4) == Mesh(dp=2, cp=2)
    assert Mesh.of(None, 4) == Mesh(dp=4)
    assert str(Mesh(dp=2, cp=3)) == "dp=2,cp=3"
    assert str(Mesh()) == "dp=1"


def test_processes_are_numbered_along_four_axes() -> None:
    mesh = Mesh(dp=2, fsdp=3, cp=2, tp=2)
    places = [mesh.place(rank) for rank in range(mesh.ranks)]
    assert [((p.dp * 3 + p.fsdp) * 2 + p.cp) * 2 + p.tp for p in places] == list(range(24))
    for axes in (("dp",), ("cp",), ("dp", "fsdp"), ("cp", "tp")):
        groups = mesh.groups(*axes)
        assert sorted(rank for group in groups for rank in group) == list(range(24))
        for group in groups:
            assert group == sorted(group)
            coordinates = {
                tuple(getattr(places[rank], a) for a in ("dp", "fsdp", "cp", "tp") if a not in axes)
                for rank in group
            }
            assert len(coordinates) == 1
            assert len(group) == math.prod(getattr(mesh, a) for a in axes)


# --- rows whose tokens are sharded


@pytest.mark.slow
def test_row_45_a_run_of_sharded_rows(settings: Make, tmp_path: Path) -> None:
    alone, shared = (
        settings(micro_batch=4, out=str(tmp_path / "alone")),
        settings(micro_batch=4, mesh="dp=2,cp=2"),
    )
    first = train(alone, quiet=True)
    together(4, lambda rank: train(shared), tmp_path / "said")
    assert lines(shared.out)[-1] == pytest.approx(lines(alone.out)[-1], rel=1e-4)
    assert first.steps == 6


def test_only_sums_over_tokens_are_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.parallel.roll.SILENCE", 1.5)
    config = translation(tmp_path, mesh="cp=2")
    logs = tmp_path / "said"
    assert ended(start(2, lambda rank: train(config), logs)) == [1, 1]
    assert (
        "ConfigError: mesh cp=2: the loss of this task is not a sum over tokens" in (logs / "1").read_text()
    )


def test_a_rank_that_waits_for_one_that_failed_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the output of both: why one failed, and where the other was."""
    monkeypatch.setattr("tests.train.processes.GRACE", 0.5)

    def run(rank: int) -> None:
        assert rank, "no luck today"
        time.sleep(600)

    with pytest.raises(
        AssertionError, match=r"(?s)rank 0: AssertionError: no luck today.*rank 1: .*Fatal Python"
    ):
        together(2, run, tmp_path)
