"""One optimizer step: the gradient of the mean loss over all trained tokens of the window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headway.errors import HeadwayError
from headway.train.loss import IGNORED
from headway.train.master_weights import MasterWeights
from headway.train.microbatch_pool import MicrobatchPool
from headway.train.objective import Batch, Examples, Trained, losses


class TrainingError(HeadwayError):
    """A run that cannot go on: a loss or gradient that is not a number."""


@dataclass(frozen=True)
class StepStats:
    """What one step saw: summed loss in nats, trained tokens, norm of the gradient before clipping; tokens that were
    read, trained or not; trained tokens that the model found most probable, None where that is not counted."""

    nats: float
    tokens: int
    grad_norm: float
    read: int
    hits: int | None = None

    @property
    def loss(self) -> float | None:
        """Nats per trained token; None when there was none."""
        return self.nats / self.tokens if self.tokens else None

    @property
    def accuracy(self) -> float | None:
        """Share of the trained tokens that the model found most probable; None where that is not counted."""
        return self.hits / self.tokens if self.tokens and self.hits is not None else None


class Sums(NamedTuple):
    """Over a window: nats, trained tokens, and how many of these were found (None where that is not counted)."""

    nats: float
    tokens: int
    hits: int | None


def accumulate(
    twin: MasterWeights[Trained], batches: Sequence[Batch], workers: MicrobatchPool | None = None
) -> Sums:
    """Add the window's gradient to `.grad` of the fp32 weights.

        gradient of (sum of losses over all micro batches) / (count of trained tokens over all micro batches)

    however the rows are cut into micro batches. They are added up in their order, whoever computes them. A window
    without a trained token has no gradient.
    """
    workers = workers or MicrobatchPool(1)
    count = sum(int((targets != IGNORED).sum()) for _, targets, _ in batches)
    if not count:
        return Sums(0.0, 0, None)

    def run(batch: Batch) -> tuple[float, int | None, tuple[Tensor | None, ...]]:
        total, _, hits = losses(twin.compute, batch)
        found = None if hits is None else int(hits.sum())
        return float(total.detach()), found, twin.gradients(total / count)

    nats, found = 0.0, None
    for start in range(
        0, len(batches), workers.count
    ):  # so that no more gradients wait than there are workers
        for part, hits, gradients in workers.map(run, batches[start : start + workers.count]):
            nats += part
            found = hits if found is None or hits is None else found + hits
            twin.add(gradients)
    return Sums(nats, count, found)


def compute_window(
    twin: MasterWeights[Trained],
    rows: Examples,
    micro_batches: Sequence[Sequence[int]],
    *,
    clip: float,
    step: int,
    workers: MicrobatchPool | None = None,
) -> StepStats:
    """Accumulate and clip. Raises TrainingError, before anything is changed by it, for a loss or a gradient that
    is not finite: the message has the step, its rows and their documents."""
    batches = [rows.batch(part) for part in micro_batches]
    nats, tokens, hits = accumulate(twin, batches, workers)
    parameters = [p for p in twin.master.parameters() if p.grad is not None]
    total = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = float(total)
    if not (math.isfinite(nats) and math.isfinite(norm)):
        what = "loss" if not math.isfinite(nats) else "gradient"
        bad = [name for name, p in twin.master.named_parameters() if not _finite(p.grad)]
        raise TrainingError(
            f"step {step}: the {what} is not finite (loss sum {nats}, gradient norm {norm}); no step was made. "
            f"Rows {', '.join(str(r) for part in micro_batches for r in part)} of {rows.file.path}"
            + (f"; not finite: {', '.join(bad[:5])}" if bad else "")
            + ". The last checkpoint is whole: resume it with a lower lr, or look at these rows"
        )
    nn.utils.clip_grads_with_norm_(parameters, clip, total)
    read = sum(int(described.valid.expand(ids.shape).sum()) for ids, _, described in batches)
    return StepStats(nats, tokens, norm, read, hits)


def _finite(grad: Tensor | None) -> bool:
    return grad is None or bool(torch.isfinite(grad).all())
