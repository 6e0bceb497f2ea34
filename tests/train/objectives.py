"""Objectives of tests, and one step of them."""

from collections.abc import Sequence
from typing import Any

import torch

from headway.data import Batch, Rows
from headway.nn import IGNORE_INDEX
from headway.train.master_weights import MasterWeights
from headway.train.microbatch_pool import MicrobatchPool
from headway.train.optimizer import Optimizer
from headway.train.tasks.base import Objective, StepStats, Sums
from headway.train.trainer import Trainer, accumulate


class Given(Objective[Any, Batch]):
    """The same micro batches in every step, and the loss of a decoder or encoder."""

    def __init__(self, batches: Sequence[Batch], where: str = "") -> None:
        self._batches, self._where = batches, where

    @staticmethod
    def of(rows: Rows, micro_batches: Sequence[Sequence[int]]) -> "Given":
        said = ", ".join(str(row) for part in micro_batches for row in part)
        return Given([rows.batch(part) for part in micro_batches], f"rows {said} of {rows.file.path}")

    def batches(self, step: int) -> Sequence[Batch]:
        return self._batches

    def count(self, batch: Batch) -> int:
        return int((batch[1] != IGNORE_INDEX).sum())

    def loss(self, model: Any, batch: Batch) -> Sums:
        ids, targets, tokens = batch
        found = model(ids, tokens=tokens, targets=targets)
        return Sums(found.total, found.nats, {} if found.hits is None else {"hits": int(found.hits.sum())})

    def where(self, step: int) -> str:
        return self._where


def accumulated(
    weights: MasterWeights[Any], batches: Sequence[Batch], pool: MicrobatchPool | None = None
) -> tuple[float, int, dict[str, float]]:
    """What `accumulate` does with these batches."""
    return accumulate(weights, Given(batches), batches, pool or MicrobatchPool(1))


def sgd_step(objective: Objective[Any, Any], model: Any, **options: Any) -> tuple[StepStats, torch.Tensor]:
    """One step of plain SGD at rate 1; what it did, and the gradient that it took, as one vector."""
    before = [p.detach().clone() for p in model.parameters()]
    trainer = Trainer(
        objective, model, Optimizer.single(model, torch.optim.SGD(model.parameters(), 1.0)), **options
    )
    stats = trainer.step()
    taken = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
    return stats, torch.cat([part.flatten() for part in taken])
