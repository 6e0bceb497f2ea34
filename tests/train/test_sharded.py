"""Several processes that have a part of every weight each train as one process does, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.parallel import Mesh, Parallel, joined
from headway.parallel.processes import ALONE
from headway.train import TextConfig
from headway.train.optimizer import Optimizer
from headway.train.sharing import shard
from headway.train.tasks.translation import TranslationConfig
from headway.train.trainer import Trainer
from tests.train.objectives import Given
from tests.train.processes import together
from tests.train.test_chat import config as chat
from tests.train.test_masked import ENCODER
from tests.train.test_processes import HALVES, as_one
from tests.train.test_step import model, ragged
from tests.train.test_translation import TINY, corpus

Make = Callable[..., TextConfig]
OPTIMIZERS = pytest.mark.parametrize("optimizer", ["adamw", "muon"])


def test_row_45_two_sharded_processes_are_one(settings: Make, tmp_path: Path) -> None:
    """Muon and AdamW, clipping, dropout, documents of all lengths, held-out text; the last step has one micro batch."""
    how = {**HALVES, "steps": 7, "epochs": None}
    as_one(settings(**HALVES, optimizer="muon", validation_share=0.1, eval_every=9), tmp_path, mesh="fsdp=2")


@pytest.mark.slow
@OPTIMIZERS
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_row_45_sharded_next_tokens_and_masked_ones(
    settings: Make, tmp_path: Path, corpus: Path, optimizer: str, dtype: str
) -> None:
    how = {**HALVES, "optimizer": optimizer, "dtype": dtype, "validation": str(corpus), "eval_every": 9}
    for name, changes in {"causal": {}, "masked": ENCODER}.items():
        (tmp_path / name).mkdir()
        as_one(settings(**how, **changes), tmp_path / name, mesh="fsdp=2")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["block", "attention", "feed_forward"])
def test_row_45_sharded_blocks_that_are_computed_again(settings: Make, tmp_path: Path, what: str) -> None:
    as_one(settings(**HALVES, gradient_checkpointing=what), tmp_path, mesh="fsdp=2")


@pytest.mark.slow
@OPTIMIZERS
def test_row_45_sharded_conversations(tmp_path: Path, optimizer: str) -> None:
    how = {**HALVES, "micro_batch": 3, "optimizer": optimizer, "backend": "auto"}
    as_one(chat(tmp_path, **how, validation_share=0.1), tmp_path, mesh="fsdp=2")


@pytest.mark.slow
def test_row_45_sharded_translation(tmp_path: Path) -> None:
    """Steps of 40 pairs, or 20; keys of the encoder's states are made before the decoder's blocks run."""
    files = corpus(tmp_path)
    held = {f"validation_{side}": path for side, path in files.items()}
    how = {
        "batch_tokens": 128,
        "micro_batch": 20,
        "seed": 1,
        "steps": 20,
        "dropout": 0.1,
        "clip": 0.3,
        "eval_every": 9,
    }
    as_one(TranslationConfig.of({**TINY, **files, **held, **how}), tmp_path, mesh="fsdp=2")


# --- steps in memory


def of_four(parallel: Parallel = ALONE) -> list[torch.Tensor]:
    """Losses and norms of three steps of four micro batches of different lengths in float64, and the weights behind
    them."""
    net: Any = model().double()
    sharded = shard(SimpleNamespace(model=net), parallel, torch.float32)  # type: ignore[arg-type]
    if sharded is not None:
        for p in net.parameters():
            assert p.to_local().shape[0] <= -(-p.shape[0] // parallel.mesh.fsdp)
    optimizer = Optimizer.single(net, torch.optim.SGD(net.parameters(), 0.1))
    trainer = Trainer(Given(ragged(4)), net, optimizer, clip=0.5, parallel=parallel)
    steps = [trainer.step() for _ in range(3)]
    whole: Any = net if sharded is None else sharded.whole()
    numbers = [[s.loss for s in steps], [s.grad_norm for s in steps]]
    return [torch.tensor(numbers, dtype=torch.float64), *(p.detach() for p in whole.parameters())]


@pytest.mark.parametrize(
    "mesh",
    [Mesh(fsdp=2), *(pytest.param(m, marks=pytest.mark.slow) for m in (Mesh(fsdp=4), Mesh(dp=2, fsdp=2)))],
    ids=str,
)
def test_row_45_four_micro_batches_by_sharded_processes(tmp_path: Path, mesh: Mesh) -> None:
    expected = of_four()

    def rank(number: int) -> None:
        with joined(str(mesh)) as parallel:
            torch.testing.assert_close(of_four(parallel), expected, rtol=0, atol=1e-12)

    together(mesh.ranks, rank, tmp_path)
