"""Records as rows that a model reads and is measured on, whatever its head.

Legend: B rows of a batch, T slots.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from headway.data import Batch
from headway.metrics import Confusion
from headway.models import Encoder
from headway.train.evaluation import Evaluation
from headway.train.microbatch_pool import MicrobatchPool
from headway.train.tasks.base import Sums

EVALUATION_SLOTS = 16384  # of one forward pass, padding included


class HeadRows(ABC):
    """What a model reads of records, and what it is to say of them: `len(rows)`, `rows.batch([..])`.

    Attributes:
        lengths: tokens of each row.   remarks: what became of records that were not taken as they are.
        unit: what the loss is a sum over.
    """

    unit: ClassVar[str] = "record"
    lengths: Sequence[int]
    remarks: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.lengths)

    def drawn(self, draw: int) -> Self:
        """The same rows: nothing in them is drawn."""
        return self

    @abstractmethod
    def batch(self, indices: Sequence[int]) -> Batch:
        """The given rows."""

    @abstractmethod
    def count(self, batch: Batch) -> int:
        """What the loss of a batch is a sum over."""

    @abstractmethod
    def loss(self, outputs: Tensor, batch: Batch) -> Sums:
        """Of the head's outputs for a batch."""

    @abstractmethod
    def predicted(self, outputs: Tensor, batch: Batch) -> Sequence[Any]:
        """What the head's outputs for a batch say of each row: what `scores` is given."""

    @abstractmethod
    def scores(self, found: Sequence[Any]) -> dict[str, float]:
        """How good the predictions of all rows are."""

    def confusion(self, found: Sequence[Any]) -> Confusion | None:
        """Which classes the predictions of all rows take for which; None where they are not of classes."""
        return None


def outputs(model: Any, batch: Batch) -> Tensor:
    """What a model's head gives for a batch, in float32 or better."""
    found: Tensor = model(**batch.inputs)
    return found.to(torch.promote_types(found.dtype, torch.float32))


def evaluate_rows(model: Encoder, rows: HeadRows, pool: MicrobatchPool | None = None) -> Evaluation:
    """Loss and scores of a model on rows, in evaluation mode; `pool` computes batches at the same time."""
    pool = pool or MicrobatchPool(1)

    @torch.no_grad()
    def run(indices: list[int]) -> tuple[list[int], float, int, Sequence[Any]]:
        batch = rows.batch(indices)
        out = outputs(model, batch)
        return indices, float(rows.loss(out, batch).loss), rows.count(batch), rows.predicted(out, batch)

    training = model.training
    model.eval()
    begin, total, count, found = time.perf_counter(), 0.0, 0, dict[int, Any]()
    try:
        for indices, loss, n, said in pool.map(run, evaluation_batches(rows.lengths)):
            total, count = total + loss, count + n
            found.update(zip(indices, said, strict=True))
    finally:
        model.train(training)
    seconds, each = time.perf_counter() - begin, [found[i] for i in range(len(rows))]
    scores, confusion = rows.scores(each), rows.confusion(each)
    return Evaluation(total, count, seconds=seconds, metrics=scores, unit=rows.unit, confusion=confusion)


def evaluation_batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Rows of like length together, as many as fit `EVALUATION_SLOTS`, or one."""
    part: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if part and lengths[i] * (len(part) + 1) > EVALUATION_SLOTS:
            yield part
            part = []
        part.append(i)
    yield part
