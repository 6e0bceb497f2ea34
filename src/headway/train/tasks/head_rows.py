"""Records as rows that a model reads and is measured on, whatever its head.

Legend: B rows of a batch, T slots.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headway.data import Batch
from headway.data.encoded import encoder_inputs
from headway.metrics import Confusion
from headway.models import ModelSpec
from headway.text import Encoded
from headway.train.evaluation import Evaluation, evaluating
from headway.train.microbatch_pool import ALONE, MicrobatchPool
from headway.train.tasks.base import Sums
from headway.train.tasks.records import RecordRows

EVALUATION_SLOTS = 16384  # of one forward pass, padding included


class HeadRows(RecordRows):
    """Rows for a head: a text each, for a model of `spec`; `lengths` are the tokens of each."""

    def __init__(self, texts: Sequence[Encoded], spec: ModelSpec, remarks: Sequence[str] = ()) -> None:
        self.texts, self.spec, self.remarks = texts, spec, remarks
        self.lengths = [len(text.ids) for text in texts]

    def inputs(self, indices: Sequence[int]) -> dict[str, Any]:
        """What the model is given of the texts of these numbers."""
        return encoder_inputs([self.texts[i] for i in indices], self.spec)

    def __len__(self) -> int:
        return len(self.lengths)

    def count(self, batch: Batch) -> int:
        """What the loss of a batch is a sum over: rows unless said otherwise."""
        return len(batch.targets)

    @abstractmethod
    def batch(self, indices: Sequence[int]) -> Batch:
        """The given rows."""

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

    def evaluate(self, model: Any, pool: MicrobatchPool = ALONE) -> Evaluation:
        """See `RecordRows`."""

        @torch.no_grad()
        def run(indices: list[int]) -> tuple[list[int], float, int, Sequence[Any]]:
            batch = self.batch(indices)
            out = outputs(model, batch)
            return indices, float(self.loss(out, batch).loss), self.count(batch), self.predicted(out, batch)

        total, count, found = 0.0, 0, dict[int, Any]()
        with evaluating(model) as clock:
            for indices, loss, n, said in pool.map(run, evaluation_batches(self.lengths)):
                total, count = total + loss, count + n
                found.update(zip(indices, said, strict=True))
            seconds = clock()
        each = [found[i] for i in range(len(self))]
        scores, confusion = self.scores(each), self.confusion(each)
        return Evaluation(total, count, seconds=seconds, metrics=scores, unit=self.unit, confusion=confusion)


def outputs(model: Any, batch: Batch) -> Tensor:
    """What a model's head gives for a batch, in float32 or better."""
    found: Tensor = model(**batch.inputs)
    return found.to(torch.promote_types(found.dtype, torch.float32))


def evaluation_batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Rows of like length together, as many as fit `EVALUATION_SLOTS`, or one."""
    part: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if part and lengths[i] * (len(part) + 1) > EVALUATION_SLOTS:
            yield part
            part = []
        part.append(i)
    yield part
