"""Checkpoints in shards: complete or absent, whichever process is killed when; written while the run goes on; written
by any number of processes and read by any other."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.api import load
from headway.checkpoints.folder import load_folder
from headway.errors import CheckpointError
from headway.parallel import Mesh
from headway.train import Callback, CallbackContext, Interrupted, TextConfig, train
from headway.train.checkpoint import STATE, State, checkpoints, step_of
from headway.train.saver import Writer
from tests.train.processes import ended, soon, start, together
from tests.train.test_processes import killed_at_ten_moments
from tests.train.test_resume import assert_same_bits, in_a_child, kill_me, killed_at_disk_call, weights

Make = Callable[..., TextConfig]
Write = Callable[[Path], None]
HALVES: dict[str, Any] = {"micro_batch": 4, "clip": 0.3, "dropout": 0.1}
SHARDS, BACKGROUND = {"checkpoints": "shards"}, {"save_in_background": True}


def shards_of(checkpoint: Path) -> int:
    return len(list(checkpoint.glob("model-shard-*")))


def writing(monkeypatch: pytest.MonkeyPatch, act: Callable[[int, int, Write, Path], None]) -> None:
    """Replaces write(folder), by which a process writes its shard, with act(rank, step, write, folder)."""
    shard = State.shard

    def acting(state: State, parallel: Any, *, copied: bool) -> Write:
        write, step = shard(state, parallel, copied=copied), state.progress.step
        return lambda folder: act(parallel.rank, step, write, folder)

    monkeypatch.setattr(State, "shard", acting)


# --- what is saved


@pytest.mark.parametrize("mesh", [pytest.param("dp=2", marks=pytest.mark.slow), "fsdp=2"])
def test_two_processes_save_what_one_does_and_go_on_as_one(settings: Make, tmp_path: Path, mesh: str) -> None:
    """They save in the background, with Muon; then one process alone resumes, whose checkpoints are folders."""
    changes = {**HALVES, "optimizer": "muon", "save_every": 2}
    alone = settings(**changes, out=str(tmp_path / "alone"))
    shared = settings(**changes, **BACKGROUND, mesh=mesh, out=str(tmp_path / "shared"))
    train(alone, quiet=True)
    together(2, lambda rank: train(shared), tmp_path / "said")
    assert_same_bits(shared.out, alone.out)
    saved = checkpoints(Path(shared.out))
    assert [(path.name, shards_of(path)) for path in saved] == [("checkpoint-4", 2), ("checkpoint-6", 2)]
    again = alone.model_copy(update={"out": str(tmp_path / "again")})
    train(again, resume=str(saved[0]), quiet=True)
    a, b = weights(again.out), weights(alone.out)
    assert all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.slow
def test_one_two_and_four_processes_go_on_from_each_other(settings: Make, tmp_path: Path) -> None:
    """With four micro-batches a step: a run resumed by another number of processes has the bits of one resumed from a
    folder with the same weights and moments."""
    base = settings(**HALVES | {"micro_batch": 2}, steps=8, save_every=2, keep_last=9)
    first = base.model_copy(update={"out": str(tmp_path / "first"), "save_every": 4})
    train(first, quiet=True)
    begin = Path(first.out) / "checkpoint-4"

    def goes_on(name: str, source: Path, ranks: int, **changes: Any) -> str:
        config = base.model_copy(update={"out": str(tmp_path / name), **changes})
        together(ranks, lambda rank: train(config, resume=str(source)), tmp_path / "said")
        return config.out

    for ranks, mesh in (
        (1, None),
        (2, "dp=2"),
        (2, "fsdp=2"),
        (4, "dp=4"),
        (4, "dp=2,fsdp=2"),
        (4, "fsdp=4"),
    ):
        folder = goes_on(f"folder-{mesh}", begin, ranks, mesh=mesh, checkpoints="folder")
        shards = goes_on(f"shards-{mesh}", begin, ranks, mesh=mesh, checkpoints="shards")
        assert shards_of(checkpoints(Path(shards))[-1]) == ranks
        assert_same_bits(shards, folder)
        for other_ranks, axes in ((1, None), (2, "fsdp=2"), (4, "dp=2,fsdp=2")):
            outs = [
                goes_on(f"{Path(out).name}-{axes}", Path(out) / "checkpoint-6", other_ranks, mesh=axes)
                for out in (folder, shards)
            ]
            assert_same_bits(*outs)


def test_a_checkpoint_in_shards_is_a_model(settings: Make, tmp_path: Path) -> None:
    config = settings(**SHARDS, out=str(tmp_path / "shards"))
    result = train(config, quiet=True)
    last = checkpoints(Path(config.out))[-1]
    assert shards_of(last) == 1
    final, from_shards = (load(path).generate("one two", max_new_tokens=5) for path in (result.model, last))
    assert from_shards.ids == final.ids
    a, b = load_folder(last).tensors, load_folder(result.model).tensors
    assert all(torch.equal(a[name], b[name]) for name in b)
    moved = settings(moments=str(last), steps=1, out=str(tmp_path / "moved"))
    plain = settings(out=str(tmp_path / "plain"))
    train(plain, quiet=True)
    file = checkpoints(Path(plain.out))[-1] / "optimizer.safetensors"
    same_moments = settings(moments=str(file), steps=1, out=str(tmp_path / "same"))
    train(moved, quiet=True)
    train(same_moments, quiet=True)
    assert_same_bits(moved.out, same_moments.out)


@pytest.mark.slow
def test_the_mean_of_checkpoints_in_shards(settings: Make, tmp_path: Path) -> None:
    changes = {"save_every": 2, "keep_last": 3, "average": 3}
    plain, shards = (
        settings(**changes, **form, out=str(tmp_path / str(i))) for i, form in enumerate(({}, BACKGROUND))
    )
    a, b = (load_folder(train(config, quiet=True).model).tensors for config in (plain, shards))
    assert all(torch.equal(a[name], b[name]) for name in b)


# --- when a checkpoint is complete


def test_the_run_goes_on_while_a_process_writes(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 writes checkpoint-3 until rank 0 calls back at step 5. Until then it is absent, although rank 0 has its
    shard written; checkpoint-6 is begun when checkpoint-3 is complete."""
    release, config = tmp_path / "go", settings(**HALVES, **BACKGROUND, save_every=3, steps=6, keep_last=9)
    out = Path(config.out)

    def slowly(rank: int, step: int, write: Write, folder: Path) -> None:
        if rank == 1 and step == 3:
            soon(release.exists, [])
        write(folder)

    def look(context: CallbackContext) -> None:
        if context.step == 4:
            soon(lambda: bool([*out.glob(".checkpoint-3.partial-*/training.json")]), [])
            soon(lambda: not [thread for thread in threading.enumerate() if isinstance(thread, Writer)], [])
        elif context.step == 5:
            assert [p.name for p in checkpoints(out)] == ["checkpoint-0"]
            release.touch()

    writing(monkeypatch, slowly)
    together(2, lambda rank: train(config, callbacks=[Callback(look, every_steps=1)]), tmp_path / "said")
    assert [step_of(p) for p in checkpoints(out)] == [0, 3, 6]
    assert not [*out.glob(".*")]


def test_what_is_saved_is_of_its_step(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard of step 2 is written after step 3."""
    stepped = tmp_path / "stepped"
    config = settings(**BACKGROUND, save_every=2, keep_last=9, out=str(tmp_path / "run"))
    plain = settings(**SHARDS, save_every=2, keep_last=9, out=str(tmp_path / "plain"))
    train(plain, quiet=True)

    def late(rank: int, step: int, write: Write, folder: Path) -> None:
        if step == 2:
            soon(stepped.exists, [])
        write(folder)

    writing(monkeypatch, late)
    train(config, quiet=True, callbacks=[Callback(lambda context: stepped.touch(), every_steps=3)])
    for name in ("checkpoint-2", "checkpoint-4", "checkpoint-6"):
        files = [p.name for p in (Path(plain.out) / name).glob("*-shard-*")]
        assert len(files) == 2
        for file in files:
            assert (Path(config.out) / name / file).read_bytes() == (
                Path(plain.out) / name / file
            ).read_bytes()


def test_a_process_that_cannot_write_ends_all_of_them(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(**HALVES, **BACKGROUND, save_every=2)

    def full(rank: int, step: int, write: Write, folder: Path) -> None:
        if rank == 1 and step == 4:
            raise OSError(28, "No space left on device", str(folder))
        write(folder)

    writing(monkeypatch, full)
    assert ended(start(2, lambda rank: train(config), tmp_path / "said")) == [1, 1]
    for rank in (0, 1):
        stderr = (tmp_path / "said" / str(rank)).read_text()
        assert "CheckpointError: could not save" in stderr
        assert "rank 1: OSError: [Errno 28] No space left on device" in stderr
        assert "resume from" in stderr
        assert "checkpoint-2" in stderr
    assert sorted(p.name for p in Path(config.out).glob("*checkpoint-*")) == ["checkpoint-0", "checkpoint-2"]


def test_a_signal_waits_for_the_save(settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(**BACKGROUND, save_every=2, keep_last=9)

    def slowly(rank: int, step: int, write: Write, folder: Path) -> None:
        time.sleep(0.2)
        write(folder)

    writing(monkeypatch, slowly)
    stop = Callback(lambda context: os.kill(os.getpid(), signal.SIGTERM), every_steps=2)
    with pytest.raises(Interrupted):
        train(config, quiet=True, callbacks=[stop])
    assert [step_of(p) for p in checkpoints(Path(config.out))] == [0, 2, 3]


@pytest.mark.slow
def test_a_process_killed_while_it_writes_leaves_the_last_checkpoint(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is killed while it writes its shard of checkpoint-4; then one process alone while it publishes that."""
    monkeypatch.setattr("headway.parallel.roll.SILENCE", 1.5)
    config = settings(**HALVES, **BACKGROUND, save_every=2, out=str(tmp_path / "killed"))
    whole = settings(**HALVES, out=str(tmp_path / "whole"))
    train(whole, quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        writing(
            patch, lambda rank, step, write, folder: kill_me() if (rank, step) == (1, 4) else write(folder)
        )
        children = start(2, lambda rank: train(config), tmp_path / "said")
        assert ended(children) == [1, -signal.SIGKILL]
    stderr = (tmp_path / "said" / "0").read_text()
    assert f"RankError: rank 1 (process {children[1]} on host" in stderr
    assert "checkpoint-2: headway train" in stderr
    assert sorted(p.name for p in Path(config.out).glob("*checkpoint-*")) == ["checkpoint-0", "checkpoint-2"]
    assert in_a_child(killed_at_disk_call(config, "checkpoint-4", 22)) == -signal.SIGKILL
    assert checkpoints(Path(config.out))[-1].name == "checkpoint-2"
    together(2, lambda rank: train(config, resume="auto"), tmp_path / "said")
    assert_same_bits(config.out, whole.out)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2", "fsdp=2,tp=2"])
def test_killed_at_ten_random_moments(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: str
) -> None:
    """Shards are saved at every step: by two processes in the background, by four in the foreground."""
    monkeypatch.setattr("headway.parallel.roll.SILENCE", 1.5)
    ranks = Mesh.read(mesh).ranks

    def look(path: Path) -> None:
        assert shards_of(path) == ranks
        load(path)

    killed_at_ten_moments(settings, tmp_path, look, mesh=mesh, **(BACKGROUND if ranks == 2 else SHARDS))


# --- what is refused


def test_a_shard_that_is_cut_off_or_gone_is_named(settings: Make) -> None:
    config = settings(**SHARDS, steps=2)
    train(config, quiet=True)
    last = checkpoints(Path(config.out))[-1]
    for kind in ("model", "optimizer"):
        file = last / f"{kind}-shard-00001-of-00001.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-8])
        with pytest.raises(CheckpointError, match=f"{file.name} is truncated"):
            train(config, resume="auto", quiet=True)
        file.write_bytes(whole)
        file.rename(last / f"{kind}-shard-00001-of-00002.safetensors")
        with pytest.raises(CheckpointError, match="holds 1 of 2 shards"):
            train(config, resume="auto", quiet=True)
        (last / f"{kind}-shard-00001-of-00002.safetensors").rename(file)
    assert (last / STATE).exists()
