"""The one training loop: accumulation, clipping, the check for finite numbers, optimizer step; log, checkpoints,
evaluation, callbacks, interruption, clock.

    history = fit(objective, model, optimizer, steps=200)     # in memory: nothing is read or written
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Generic, Protocol

import torch
from torch import Tensor, nn

from headway.errors import HeadwayError
from headway.train.callbacks import Callback, CallbackContext, Interrupted, StopRequest
from headway.train.checkpoint import Progress
from headway.train.evaluation import Evaluation
from headway.train.master_weights import MasterWeights
from headway.train.microbatch_pool import MicrobatchPool
from headway.train.optimizer import Optimizer
from headway.train.progress import Reporter
from headway.train.tasks.base import B, M, Objective, StepStats


class TrainingError(HeadwayError):
    """A run that cannot go on: a loss or gradient that is not a number."""


class Store(Protocol):
    """Where a run is kept: `headway.train.run_folder.RunFolder`."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl."""

    def save(self) -> Path:
        """Write a checkpoint of the run's state."""


class Trainer(Generic[M, B]):
    """Steps an optimizer along the gradient of

        (sum of the losses of all micro batches of the step) / (number of their targets)

    however the step is cut into micro batches.

    Args:
        objective: batches and their losses.
        model: fp32, whose parameters `optimizer` steps. It is put into training mode.
        schedule: (step from 0, seconds of training) -> factor of the optimizer's peak learning rates.
        clip: largest norm of a step's gradient.
        dtype: of the weights that compute (`MasterWeights`).
        pool: runs micro batches at the same time; one after the other unless given.
        progress: what was done before; nothing unless given.
        steps: length of the run. max_seconds: and its length by the clock. Whichever comes first ends it.
        eval_every, save_every: steps between evaluations, and between checkpoints; only at the end unless given.
        callbacks: called between steps.
        store: keeps metrics and checkpoints; nothing is written unless given.
        reporter: says on stderr where the run is; nobody does unless given.
    """

    def __init__(
        self,
        objective: Objective[M, B],
        model: M,
        optimizer: Optimizer,
        *,
        schedule: Callable[[int, float], float] = lambda step, seconds: 1.0,
        clip: float = math.inf,
        dtype: torch.dtype = torch.float32,
        pool: MicrobatchPool | None = None,
        progress: Progress | None = None,
        steps: int | None = None,
        max_seconds: float | None = None,
        eval_every: int | None = None,
        save_every: int | None = None,
        callbacks: Sequence[Callback] = (),
        store: Store | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        self.objective, self.schedule, self.clip = objective, schedule, clip
        self.pool = pool or MicrobatchPool(1)
        self.weights = MasterWeights(model, dtype, self.pool.count)
        for replica in self.weights.replicas:
            replica.train()
        self.optimizer, self.progress = optimizer, progress or Progress()
        self.steps, self.max_seconds = steps, max_seconds
        self.eval_every, self.save_every = eval_every, save_every
        self.callbacks, self.store = list(callbacks), store
        self.reporter = reporter or Reporter(steps, 1, quiet=True)
        self.validation: Evaluation | None = None
        self._began = time.monotonic() - self.progress.seconds
        self._called = [self._began] * len(self.callbacks)
        self._stop = StopRequest(self.say)

    def run(self) -> dict[str, Any]:
        """To the end; the last step's line of metrics.jsonl, empty where no step was left to do.

        Raises TrainingError; with a store, Interrupted after Ctrl-C or SIGTERM, when the running step is done and
        saved."""
        record: dict[str, Any] = {}
        with self.pool:
            with self._stop if self.store is not None else nullcontext():
                last = self._done
                while not last:
                    record = self._record(self.step())
                    self._log(record)
                    self.reporter.step(record)
                    last = self._done
                    self._between_steps(record, last)
            self.measure(last=True)
            self.save()
        return record

    def step(self) -> StepStats:
        """One optimizer step; none is made for batches without a target.

        Raises TrainingError, before weights are changed, for a loss or a gradient that is not finite."""
        begin, progress, optimizer = time.monotonic(), self.progress, self.optimizer
        loss_sum, count, extra = accumulate(
            self.weights, self.objective, self.objective.batches(progress.step), self.pool
        )
        norm = self._clip(loss_sum)
        factor = self.schedule(progress.step, self.seconds)
        if count:
            optimizer.step(factor)
            self.weights.refresh()
        progress.step += 1
        progress.trained_tokens += count
        seconds = time.monotonic() - begin
        return StepStats(loss_sum, count, norm, optimizer.peak_lr * factor, seconds, extra)

    def measure(self, *, last: bool) -> None:
        """Evaluate on held-out data, if there is any."""
        found = self.objective.evaluate(self.weights.compute, self.pool, last=last)
        if found is not None:
            self.validation, number = found, self.progress.step
            self.say(f"held out, step {number}: {found}")
            self._log({"step": number, **found.record})

    def save(self) -> Path | None:
        """A checkpoint of where the run is; None without a store."""
        self.progress.seconds = self.seconds
        return None if self.store is None else self.store.save()

    def say(self, text: str) -> None:
        """A remark on stderr."""
        self.reporter.note(text)

    @property
    def seconds(self) -> float:
        """Of training, over all processes of the run."""
        return time.monotonic() - self._began

    @property
    def _done(self) -> bool:
        by_steps = self.steps is not None and self.progress.step >= self.steps
        return by_steps or (self.max_seconds is not None and self.seconds >= self.max_seconds)

    def _clip(self, loss_sum: float) -> float:
        """Check and clip the gradient; its norm before."""
        gradients = [p.grad for p in self.weights.master.parameters() if p.grad is not None]
        total = nn.utils.get_total_norm(gradients)
        norm, step = float(total), self.progress.step
        if not (math.isfinite(loss_sum) and math.isfinite(norm)):
            what = "loss" if not math.isfinite(loss_sum) else "gradient"
            bad = [n for n, p in self.weights.master.named_parameters() if not _is_finite(p.grad)]
            raise TrainingError(
                f"step {step + 1}: the {what} is not finite (loss sum {loss_sum}, gradient norm {norm}); no step was "
                f"made. It read {self.objective.where(step)}"
                + (f"; not finite: {', '.join(bad[:5])}" if bad else "")
                + ". A run that is resumed comes here again: look at this data, or begin anew with a lower learning "
                "rate or a longer warm-up"
            )
        nn.utils.clip_grads_with_norm_(self.weights.master.parameters(), self.clip, total)
        return norm

    def _record(self, stats: StepStats) -> dict[str, Any]:
        progress = self.progress
        epoch = self.objective.epoch(progress.step)
        left = [] if self.steps is None else [(self.steps - progress.step) * stats.seconds]
        if self.max_seconds is not None:
            left.append(max(0.0, self.max_seconds - self.seconds))
        return {
            "step": progress.step,
            **({} if epoch is None else {"epoch": epoch}),
            "loss": stats.loss,
            "tokens": stats.count,
            "trained_tokens": progress.trained_tokens,
            "tokens_per_s": stats.count / stats.seconds,
            "lr": stats.lr,
            "grad_norm": stats.grad_norm,
            **self.objective.metrics(stats),
            "seconds": self.seconds,
            "eta_s": min(left, default=None),
        }

    def _between_steps(self, record: dict[str, Any], last: bool) -> None:
        """What is due between two steps, or after the last one."""
        number = self.progress.step
        if self.eval_every and number % self.eval_every == 0 and not last:
            self.measure(last=False)
        if self.save_every and number % self.save_every == 0 and not last:
            self.save()
        if self._stop.asked and not last and (saved := self.save()) is not None:
            raise Interrupted(saved)
        for i, callback in enumerate(self.callbacks):
            now = time.monotonic()
            if last or callback.is_due(number, now - self._called[i]):
                self._called[i] = now
                self._call(callback, record, last)

    def _call(self, callback: Callback, record: dict[str, Any], last: bool) -> None:
        model, kept = self.weights.compute, torch.get_rng_state()
        model.eval()
        try:
            with torch.no_grad():
                callback.function(
                    CallbackContext(
                        self.progress.step,
                        self.seconds,
                        last,
                        record,
                        model,
                        self.objective.tokenizer,
                        self.say,
                    )
                )
        finally:
            model.train()
            torch.set_rng_state(kept)  # looking changes nothing

    def _log(self, record: Mapping[str, Any]) -> None:
        if self.store is not None:
            self.store.log(record)


def fit(
    objective: Objective[M, B],
    model: M,
    optimizer: Optimizer,
    *,
    steps: int,
    schedule: Callable[[int, float], float] = lambda step, seconds: 1.0,
    clip: float = math.inf,
) -> list[StepStats]:
    """Train `model` in memory by the steps of `headway train`; what each step did. Nothing is read or written.

        class Copy(Objective[Decoder, Tensor]):                       # rows of bytes [B, T + 1]
            def __init__(self, seed):
                self.seed = seed

            def batches(self, step):                                  # drawn by (seed, step)
                noise = torch.Generator().manual_seed(keyed(self.seed, step))
                return [torch.randint(0, 256, (8, 65), generator=noise)]

            def count(self, batch):
                return batch[:, 1:].numel()

            def loss(self, model, batch):
                found = model(batch[:, :-1], targets=batch[:, 1:])
                return Sums(found.total, found.nats)

        for seed in (0, 1, 2):
            model = build(spec, seed=seed)
            optimizer = Optimizer.single(model, torch.optim.Adam(model.parameters(), 4e-3))
            curve = [stats.loss for stats in fit(Copy(seed), model, optimizer, steps=200, clip=1.0)]

    `schedule` and `clip` are those of `Trainer`. Batches are asked for in the order of the steps, each once, so that an
    objective may keep a generator instead. Dropout draws from torch's generator: fork it (`torch.random.fork_rng`)
    and seed it where runs are to be equal.

    Raises TrainingError for a loss or a gradient that is not finite.
    """
    trainer = Trainer(objective, model, optimizer, schedule=schedule, clip=clip)
    return [trainer.step() for _ in range(steps)]


def accumulate(
    weights: MasterWeights[M], objective: Objective[M, B], batches: Sequence[B], pool: MicrobatchPool
) -> tuple[float, int, dict[str, float]]:
    """Add the gradient of a step to `.grad` of the fp32 weights; the sum of its losses, its targets, further sums.

    Gradients are added up in the order of the micro batches, whichever of them is done first. Batches without a target
    have no gradient."""
    count = sum(objective.count(batch) for batch in batches)
    loss_sum, extra = 0.0, dict[str, float]()
    if not count:
        return loss_sum, count, extra

    def run(job: tuple[M, B]) -> tuple[float, Mapping[str, float]]:
        found = objective.loss(*job)
        (found.total / count).backward()
        return float(found.loss), found.extra

    for start in range(0, len(batches), pool.count):  # no more gradients wait than there are replicas
        jobs = zip(weights.replicas, batches[start : start + pool.count], strict=False)
        for loss, sums in pool.map(run, jobs):
            loss_sum += loss
            for name, value in sums.items():
                extra[name] = extra.get(name, 0) + value
        weights.collect()
    return loss_sum, count, extra


def _is_finite(grad: Tensor | None) -> bool:
    return grad is None or bool(torch.isfinite(grad).all())
