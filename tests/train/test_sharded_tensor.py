"""Runs whose layers are shared by the axis tp, and these shares sharded by the axis fsdp, are those of tp and dp, bit
for bit, and so those of one process (`test_tensor_parallel.py`, which has the steps in memory)."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headway.parallel import Mesh
from headway.train import TextConfig, train
from tests.train.test_processes import as_one
from tests.train.test_resume import weights
from tests.train.test_tensor_parallel import BOTH, SHARED, assert_close, by, open_state

Make = Callable[..., TextConfig]
BESIDE = Mesh(dp=2, tp=2)
ODD = {**SHARED, "hidden": 22, "validation_share": 0.1, "eval_every": 3}
"""11 hidden units of a process are 6 and 5."""


@pytest.mark.slow
def test_row_45_checkpoints_of_both_are_read_by_any_mesh(settings: Make, tmp_path: Path) -> None:
    """In shards, written in the background, and folders; either has the bits of the run, moments of Muon included."""
    config = settings(**ODD, optimizer="muon")
    train(config, quiet=True)
    folders = by(BOTH, config.model_copy(update={"checkpoints": "folder"}), tmp_path / "folders")
    shards = by(BOTH, config.model_copy(update={"save_in_background": True}), tmp_path / "shards")
    assert_close(shards.out, config.out, after=0)
    there = Path(shards.out) / "checkpoint-4"
    assert len(list(there.glob("model-shard-*"))) == len(list(there.glob("optimizer-shard-*"))) == 4
    files = [open_state(Path(out) / "checkpoint-4") for out in (shards.out, folders.out)]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])

    for mesh in (BOTH, BESIDE):
        again = by(mesh, config, tmp_path / f"again {mesh}", str(there))
        assert all(torch.equal(t, weights(shards.out)[name]) for name, t in weights(again.out).items())
    for mesh in (Mesh(), Mesh(tp=2), Mesh(fsdp=2)):
        again = by(mesh, config, tmp_path / f"again {mesh}", str(there))
        assert_close(again.out, config.out, after=4)
    for name, source in {"alone": config.out, "folders": folders.out}.items():
        again = by(BOTH, config, tmp_path / f"from {name}", f"{source}/checkpoint-4")
        assert_close(again.out, config.out, after=4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_row_45_adapters_and_their_shards(settings: Make, tmp_path: Path, kind: str) -> None:
    """From shards of both axes one process resumes."""
    first = train(settings(**SHARED | {"steps": 1}), quiet=True)
    shape = ("vocab", "depth", "width", "heads", "kv_heads", "hidden", "patterns", "dropout")
    how = {
        **SHARED,
        **dict.fromkeys(shape),
        "model": str(first.model),
        "adapter": kind,
        "rank": 3,
        "lr": 0.01,
    }
    config = settings(**how, out=str(tmp_path / "one"))
    as_one(config, tmp_path, mesh=str(BOTH), other=str(BESIDE))
    train(config, quiet=True)
    there = tmp_path / "shared" / "checkpoint-4"
    assert len(list(there.glob("adapter-shard-*"))) == 4
    again = config.model_copy(update={"out": str(tmp_path / "again")})
    train(again, resume=str(there), quiet=True)
    assert_close(again.out, config.out, after=4)
