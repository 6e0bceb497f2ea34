"""Steps that processes share, compared in memory, equal those of one process, and wrong ones are noticed."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.data import Batch
from headway.parallel import Mesh, Parallel, joined
from headway.parallel.processes import ALONE
from headway.train.optimizer import Optimizer
from headway.train.sharing import divide
from headway.train.tasks.base import Sums
from headway.train.trainer import Trainer
from tests.parallel import steps
from tests.train.objectives import Given
from tests.train.processes import together
from tests.train.test_sharded import stepped
from tests.train.test_step import model, ragged


@pytest.mark.parametrize("ranks", [2, 4])
def test_row_45_four_micro_batches_by_one_two_and_four(tmp_path: Path, ranks: int) -> None:
    expected = stepped(4)

    def rank(number: int) -> None:
        with joined() as parallel:
            torch.testing.assert_close(stepped(4, parallel), expected, rtol=0, atol=1e-12)

    together(ranks, rank, tmp_path)


def mean_of_means(parallel: Parallel, tensors: Iterable[torch.Tensor], *axes: str) -> None:
    """A wrong sum: each process's gradient is divided by its own trained tokens."""
    objective = Given(ragged(4))
    counts = parallel.gather(sum(objective.count(batch) for _, batch in parallel.share(ragged(4))))
    for t in (gradients := list(tensors)):
        t.mul_(sum(counts) / counts[parallel.rank] / parallel.mesh.ranks)
    add_up(parallel, gradients, *axes)


def repeated(parallel: Parallel, items: Sequence[Any]) -> list[tuple[int, Any]]:
    """A wrong share: the first item of every process is that of the main process."""
    return [(0, items[0]), *share(parallel, items)[1:]]


add_up, share = Parallel.add_up, Parallel.share
WRONG: dict[str, tuple[str, Any]] = {
    "a mean of means": ("add_up", mean_of_means),
    "a lost sum": ("add_up", lambda parallel, tensors, *axes: None),
    "a repeated row": ("share", repeated),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_row_45_what_is_wrong_shows(tmp_path: Path, wrong: str) -> None:
    expected = stepped(4)

    def rank(number: int) -> None:
        setattr(Parallel, *WRONG[wrong])
        with joined() as parallel:
            _, *weights = stepped(4, parallel)
        distance = max(float((a - b).abs().max()) for a, b in zip(weights, expected[1:], strict=True))
        assert distance > 1e-4, distance

    together(2, rank, tmp_path)


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(cp=2),
        *(
            pytest.param(m, marks=pytest.mark.slow)
            for m in (Mesh(dp=2, cp=2), Mesh(dp=4), Mesh(fsdp=2, cp=2))
        ),
    ],
    ids=str,
)
def test_row_45_steps_of_sharded_rows_are_those_of_one_process(mesh: Mesh, tmp_path: Path) -> None:
    """Losses of three steps and the weights after them in float64; some processes have no trained token."""

    def of_rows(name: str, parallel: Parallel = ALONE) -> tuple[list[float | None], list[torch.Tensor]]:
        net = steps.model_of(name)
        ids, targets, tokens = steps.rows(name)
        batch = Batch({"ids": ids, "tokens": tokens}, targets)
        sharded = divide(SimpleNamespace(model=net), parallel, torch.float32)  # type: ignore[arg-type]
        optimizer = Optimizer.single(net, torch.optim.SGD(net.parameters(), 0.1))
        trainer = Trainer(Given([batch] * mesh.batches), net, optimizer, clip=0.5, seed=0, parallel=parallel)
        losses = [trainer.step().loss for _ in range(3)]
        whole: Any = net if sharded is None else sharded.whole()
        return losses, [p.detach() for p in whole.parameters()]

    names = list(steps.PATTERNS)
    expected = {name: of_rows(name) for name in names}

    def rank(number: int) -> None:
        with joined(str(mesh)) as parallel:
            for name in names:
                losses, weights = of_rows(name, parallel)
                torch.testing.assert_close(losses, expected[name][0], rtol=1e-10, atol=0)
                torch.testing.assert_close(weights, expected[name][1], rtol=1e-10, atol=1e-12)

    together(mesh.ranks, rank, tmp_path)


class Draws(Given):
    """An objective that records a number that torch draws in each micro-batch."""

    def __init__(self, parts: Sequence[Batch]) -> None:
        super().__init__(parts)
        self.drawn: list[float] = []

    def loss(self, model: Any, batch: Any) -> Sums:
        self.drawn.append(float(torch.rand(())))
        return super().loss(model, batch)


def test_dropout_is_drawn_by_the_step_and_the_number_of_the_micro_batch() -> None:
    def drawn(seed: int | None) -> list[float]:
        objective, net = Draws(ragged(2)), model()
        optimizer = Optimizer.single(net, torch.optim.SGD(net.parameters(), 0.0))
        trainer = Trainer(objective, net, optimizer, seed=seed)
        for _ in range(2):
            trainer.step()
        return objective.drawn

    first, again, other = drawn(0), drawn(0), drawn(1)
    assert len(first) == len({*first}) == 4
    assert again == first
    assert not {*first} & {*other}
