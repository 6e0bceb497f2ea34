"""An objective with fixed micro-batches, and functions that take one step with it."""

from collections.abc import Sequence
from typing import Any

import torch

from headway.data import Batch, Rows
from headway.train.microbatch_pool import MasterWeights, MicrobatchPool
from headway.train.optimizer import Optimizer
from headway.train.tasks.base import Objective, StepStats
from headway.train.trainer import Trainer, accumulate


class Given(Objective[Any]):
    """An objective with the same micro-batches in every step."""

    def __init__(self, parts: Sequence[Batch], where: str = "") -> None:
        self._parts, self._where = parts, where

    @staticmethod
    def of(rows: Rows, micro_batches: Sequence[Sequence[int]]) -> "Given":
        row_names = ", ".join(str(row) for part in micro_batches for row in part)
        return Given([rows.batch(part) for part in micro_batches], f"rows {row_names} of {rows.file.path}")

    def batches(self, step: int) -> Sequence[Batch]:
        return self._parts

    def where(self, step: int) -> str:
        return self._where


def accumulated(
    weights: MasterWeights[Any], batches: Sequence[Batch], pool: MicrobatchPool | None = None
) -> tuple[float, int, dict[str, float]]:
    """Returns the result of `accumulate` on these batches."""
    objective = Given(batches)
    return accumulate(weights, objective, objective.batches(0), pool or MicrobatchPool(1))


def sgd_step(objective: Objective[Any], model: Any, **options: Any) -> tuple[StepStats, torch.Tensor]:
    """Takes one step of plain SGD at rate 1; returns its statistics and the applied gradient as one vector."""
    before = [p.detach().clone() for p in model.parameters()]
    trainer = Trainer(
        objective, model, Optimizer.single(model, torch.optim.SGD(model.parameters(), 1.0)), **options
    )
    stats = trainer.step()
    differences = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
    return stats, torch.cat([part.flatten() for part in differences])
