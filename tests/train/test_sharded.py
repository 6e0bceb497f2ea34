"""Several processes that each have a shard of every weight train as one process does, bit for bit."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from headway.parallel import Mesh, Parallel, joined
from headway.parallel.processes import ALONE
from headway.parallel.sharded import fill, shard_weights, whole
from headway.train import TextConfig, train
from headway.train.checkpoint import checkpoints
from headway.train.optimizer import Optimizer
from headway.train.sharing import divide
from headway.train.trainer import Trainer
from tests.train.objectives import Given
from tests.train.processes import ended, start, together
from tests.train.test_processes import HALVES, as_one
from tests.train.test_resume import assert_same_bits, in_a_child, killed_at_micro_batch, lines
from tests.train.test_step import model, ragged

Make = Callable[..., TextConfig]


def test_row_45_two_sharded_processes_are_one(settings: Make, tmp_path: Path) -> None:
    """With Muon and AdamW, clipping, dropout, documents of all lengths and held-out text."""
    changes = {**HALVES, "steps": 8, "optimizer": "muon"}
    as_one(settings(**changes, validation_share=0.1, eval_every=4), tmp_path, mesh="fsdp=2")


@pytest.mark.slow
def test_row_45_prompts_are_continued_as_by_one_process(settings: Make, tmp_path: Path) -> None:
    prompts = {"sample_prompts": ("one two", "while"), "sample_tokens": 6, "sample_every": 2}
    config = settings(**HALVES | {"steps": 6}, **prompts)

    def said(ranks: int, mesh: str | None) -> list[str]:
        run_config = config.model_copy(update={"mesh": mesh, "out": str(tmp_path / f"run {ranks}")})
        together(ranks, lambda rank: train(run_config), tmp_path / f"said {ranks}")
        return re.findall(r"^step \d+: .*", (tmp_path / f"said {ranks}" / "0").read_text(), re.MULTILINE)

    assert len(alone := said(1, None)) == 6
    assert said(2, "fsdp=2") == alone


@pytest.mark.slow
def test_row_45_two_replicas_of_two_parts(settings: Make, tmp_path: Path) -> None:
    """Muon's matrices have four owners, and the sums over four micro-batches are in another order."""
    alone, shared = (settings(optimizer="muon", micro_batch=2, out=str(tmp_path / name)) for name in "ab")
    train(alone, quiet=True)
    together(4, lambda rank: train(shared.model_copy(update={"mesh": "dp=2,fsdp=2"})), tmp_path / "said")
    assert lines(shared.out)[-1] == pytest.approx(lines(alone.out)[-1], rel=1e-3)


@pytest.mark.slow
def test_killed_and_resumed_by_one_and_by_two_sharded(settings: Make, tmp_path: Path) -> None:
    """Two processes are killed, then one that resumed alone; two finish the run."""
    whole = settings(**HALVES | {"steps": 6}, optimizer="muon", out=str(tmp_path / "whole"))
    single = whole.model_copy(update={"out": str(tmp_path / "killed"), "save_every": 2})
    sharded = single.model_copy(update={"mesh": "fsdp=2"})
    train(whole, quiet=True)
    assert ended(start(2, lambda rank: killed_at_micro_batch(sharded, 4)(), tmp_path / "one")) == [-9, -9]
    assert [path.name for path in checkpoints(Path(single.out))][-1] == "checkpoint-2"
    assert in_a_child(killed_at_micro_batch(single, 5)) == -9
    assert [path.name for path in checkpoints(Path(single.out))][-1] == "checkpoint-4"
    together(2, lambda rank: train(sharded, resume="auto"), tmp_path / "two")
    assert "not bit for bit" not in (tmp_path / "two" / "0").read_text()
    assert_same_bits(single.out, whole.out)


@pytest.mark.slow
def test_of_a_frozen_base_nothing_is_gathered_for_a_folder(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for checkpoints nor for the final model: every gathered shape has a side of the adapter's rank, 5."""
    first = train(settings(), quiet=True)
    fresh = dict.fromkeys(("vocab", "depth", "width", "heads", "kv_heads", "hidden", "patterns", "dropout"))
    changes = {**fresh, "micro_batch": 4, "model": str(first.model), "adapter": "lora", "rank": 5, "steps": 2}
    alone = settings(**changes, checkpoints="folder", out=str(tmp_path / "alone"))
    shared = alone.model_copy(update={"mesh": "fsdp=2", "out": str(tmp_path / "shared")})
    train(alone, quiet=True)
    redistribute = DTensor.redistribute

    def gathered(value: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        print("gathered", *value.shape, file=sys.stderr)
        return redistribute(value, *args, **kwargs)

    monkeypatch.setattr(DTensor, "redistribute", gathered)
    together(2, lambda rank: train(shared), tmp_path / "said")
    shapes = re.findall(r"^gathered (.*)", (tmp_path / "said" / "1").read_text(), re.MULTILINE)
    assert len(shapes) >= 14 * 2
    assert all("5" in shape.split() for shape in shapes)
    assert_same_bits(shared.out, alone.out)


# --- steps in memory


def test_a_step_of_parts_has_the_bits_of_one_of_the_whole(tmp_path: Path) -> None:
    """Parameters have rows of 1 to 40 numbers, so that the last numbers of a shard do not fill a vector register."""

    def weights(parallel: Parallel = ALONE) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        net = torch.nn.ParameterList(torch.randn(5, n, generator=generator) for n in range(1, 41))
        slopes = [torch.randn(5, n, generator=generator) for n in range(1, 41)]
        if parallel.mesh.fsdp > 1:
            shard_weights(net, [], DeviceMesh.from_group(parallel.group("fsdp"), "cpu"))
        optimizer = Optimizer.single(net, torch.optim.AdamW(net.parameters(), 0.1, fused=True))
        for _ in range(3):
            for p, slope in zip(net.parameters(), slopes, strict=True):
                p.grad = torch.zeros_like(p)
                fill(p.grad, {"slope": slope}, "slope")
            optimizer.step(1.0)
        values = {str(i): p.detach() for i, p in enumerate(net.parameters())} | optimizer.state_tensors()
        return [*whole(values, net).values()]

    expected = weights()

    def rank(number: int) -> None:
        with joined("fsdp=2") as parallel:
            assert all(map(torch.equal, weights(parallel), expected))

    together(2, rank, tmp_path)


def stepped(count: int, parallel: Parallel = ALONE) -> list[torch.Tensor]:
    """Returns losses and norms of three steps of `count` micro-batches of different lengths in float64, and the weights
    after them."""
    net: Any = model().double()
    sharded = divide(SimpleNamespace(model=net), parallel, torch.float32)  # type: ignore[arg-type]
    if sharded is not None:
        for p in net.parameters():
            assert p.to_local().shape[0] <= -(-p.shape[0] // parallel.mesh.fsdp)
    optimizer = Optimizer.single(net, torch.optim.SGD(net.parameters(), 0.1))
    trainer = Trainer(Given(ragged(count)), net, optimizer, clip=0.5, parallel=parallel)
    steps = [trainer.step() for _ in range(3)]
    plain: Any = net if sharded is None else sharded.whole()
    numbers = [[s.loss for s in steps], [s.grad_norm for s in steps]]
    return [torch.tensor(numbers, dtype=torch.float64), *(p.detach() for p in plain.parameters())]


@pytest.mark.parametrize(
    "mesh",
    [Mesh(fsdp=2), *(pytest.param(m, marks=pytest.mark.slow) for m in (Mesh(fsdp=4), Mesh(dp=2, fsdp=2)))],
    ids=str,
)
def test_row_45_four_micro_batches_by_sharded_processes(tmp_path: Path, mesh: Mesh) -> None:
    """Also of three micro-batches, so that one process has none in the last turn."""
    expected = [stepped(count) for count in (3, 4)]

    def rank(number: int) -> None:
        with joined(str(mesh)) as parallel:
            actual = [stepped(count, parallel) for count in (3, 4)]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)

    together(mesh.ranks, rank, tmp_path)
