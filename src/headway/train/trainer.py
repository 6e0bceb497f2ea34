"""The training step of all tasks: gradient accumulation, the check for finite values, clipping, and the optimizer.

    history = fit(objective, model, optimizer, steps=200)     # in memory: nothing is read or written

A run in a folder (log, checkpoints, evaluation, callbacks, interruption) is `headway.train.run`.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from headway.data.order import keyed
from headway.errors import HeadwayError
from headway.models.tensor_parallel import shards_of
from headway.nn.router_losses import router_losses, routing_of
from headway.parallel.processes import ALONE, Parallel
from headway.parallel.sharded import own_part
from headway.train.microbatch_pool import M, MasterWeights, MicrobatchPool
from headway.train.optimizer import Optimizer
from headway.train.sharing import add_gradients, own_batch
from headway.train.tasks.base import Objective, StepStats

Schedule = Callable[[int, float], float]
"""Function (step from 0, seconds of training) -> factor of the peak learning rates."""


class TrainingError(HeadwayError):
    """Raised if the loss or a gradient is not finite."""


@dataclass
class Progress:
    """The progress of a run. The position in the data follows from `step`, since the order is a pure function of it.

    Attributes:
        step: number of optimizer steps done.
        trained_tokens: number of targets that were trained.
        seconds: seconds spent in the loop, also before the run was resumed.
        best, best_step: the best measure on held-out data (None before the first), and the step of that model.
        evaluated: the step of the last comparison of models; -1 before the first.
        waited: number of comparisons in a row that found nothing better.
    """

    step: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_step: int = 0
    evaluated: int = -1
    waited: int = 0


class Trainer(Generic[M]):
    """Makes optimizer steps with the gradient of

        (sum of the losses of all micro-batches of the step) / (number of their targets)

    whatever the number of micro-batches is.

    Args:
        objective: provides the batches and their losses.
        model: the fp32 model whose parameters `optimizer` has. It is put into training mode.
        schedule: factor of the optimizer's peak learning rates.
        clip: largest norm of a step's gradient.
        dtype: dtype of the weights that compute (`MasterWeights`).
        pool: computes micro-batches in parallel [default: one after the other].
        progress: progress of earlier steps [default: none].
        seed: the dropout of a micro-batch is seeded by (seed, step, its number in the step), whoever computes it
            [default: dropout draws from torch's generator as it is].
        parallel: the processes that share the micro-batches of each step, and the tokens of their rows [default: this
            process alone].
    """

    def __init__(
        self,
        objective: Objective[M],
        model: M,
        optimizer: Optimizer,
        *,
        schedule: Schedule = lambda step, seconds: 1.0,
        clip: float = math.inf,
        dtype: torch.dtype = torch.float32,
        pool: MicrobatchPool | None = None,
        progress: Progress | None = None,
        seed: int | None = None,
        parallel: Parallel = ALONE,
    ) -> None:
        self.seed, self.parallel = seed, parallel
        self.objective, self.optimizer, self.schedule, self.clip = objective, optimizer, schedule, clip
        self.pool, self.progress = pool or MicrobatchPool(1), progress or Progress()
        self.weights = MasterWeights(model, dtype, self.pool.count)
        for replica in self.weights.replicas:
            replica.train()
        self.began = time.monotonic() - self.progress.seconds

    @property
    def seconds(self) -> float:
        """Seconds of training, including those before the run was resumed."""
        return time.monotonic() - self.began

    def step(self) -> StepStats:
        """Makes one optimizer step; weights are not changed if the step's batches have no target.

        Raises TrainingError, before weights are changed, if the loss or a gradient is not finite."""
        begin, progress = time.monotonic(), self.progress
        batches = self.objective.batches(progress.step)
        seed = None if self.seed is None else keyed(self.seed, progress.step)
        loss_sum, count, sums = accumulate(
            self.weights, self.objective, batches, self.pool, seed=seed, parallel=self.parallel
        )
        norm = self._clip(loss_sum)
        factor = self.parallel.agree(self.schedule(progress.step, self.seconds))
        if count:
            self.optimizer.step(factor)
            self.weights.refresh()
        progress.step += 1
        progress.trained_tokens += count
        seconds = time.monotonic() - begin
        return StepStats(loss_sum, count, norm, self.optimizer.peak_lr * factor, seconds, sums)

    def _clip(self, loss_sum: float) -> float:
        """Clips the gradient; returns its norm before. Raises TrainingError if it or the loss is not finite."""
        named, step = dict(self.weights.master.named_parameters()), self.progress.step
        gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
        local, shards = {name: own_part(g) for name, g in gradients.items()}, shards_of(self.weights.master)
        wholes = set() if shards is None else {name for name in local if not shards.is_part(name)}
        parts = [g for name, g in local.items() if name not in wholes]
        total = gradient_norm(parts, self.parallel, [local[name] for name in wholes])
        norm = float(total)
        if not (math.isfinite(loss_sum) and math.isfinite(norm)):
            what = "loss" if not math.isfinite(loss_sum) else "gradient"
            not_finite = [name for name, grad in gradients.items() if not bool(torch.isfinite(grad).all())]
            raise TrainingError(
                f"step {step + 1}: the {what} is not finite (loss sum {loss_sum}, gradient norm {norm}); the "
                f"weights were not updated. The data: {self.objective.where(step)}"
                + (f"; gradients not finite: {', '.join(not_finite[:5])}" if not_finite else "")
                + ". A resumed run fails at the same step: check this data, or start again with a lower learning rate "
                "or a longer warm-up"
            )
        factor = (self.clip / (total + 1e-6)).clamp(max=1.0)
        for gradient in local.values():
            gradient.mul_(factor)
        return norm


def accumulate(
    weights: MasterWeights[M],
    objective: Objective[M],
    batches: Sequence[Any],
    pool: MicrobatchPool,
    *,
    seed: int | None = None,
    parallel: Parallel = ALONE,
) -> tuple[float, int, dict[str, float]]:
    """Adds the gradient of a step to `.grad` of the fp32 weights; returns the sum of the losses, the number of targets,
    and the other sums, over all processes.

    For each target, the router losses over the tokens of its micro-batch are added to the loss (`router_losses`).
    Gradients are added up in the order of the micro-batches, whichever finishes first: each process adds up its own,
    and then those of all processes are added once. If there is no target, there is no gradient. `seed` seeds the
    dropout of the step."""
    local = [(i, own_batch(batch, weights.master, parallel), 1) for i, batch in parallel.share(batches)]
    count = sum(parallel.gather_parts(sum(objective.count(batch) for _, batch, _ in local)))
    if not count:
        return 0.0, 0, {}
    loss_sum, extra = 0.0, dict[str, float]()
    if parallel.in_step:  # a process with fewer micro-batches repeats the first one with weight 0
        idle = -(-len(batches) // parallel.mesh.batches) - len(local)
        local += [(0, own_batch(batches[0], weights.master, parallel), 0)] * idle

    def run(job: tuple[M, tuple[int, Any, int]]) -> tuple[float, Mapping[str, float]]:
        replica, (number, batch, times) = job
        if seed is not None:
            torch.manual_seed(keyed(seed, number, parallel.place.cp))
        with parallel.named():
            with routing_of(replica) as routed:
                result = objective.loss(replica, batch)
            total, sums = result.total, dict(result.extra)
            if routed and (targets := objective.count(batch)):
                added = router_losses(routed)
                total = total + targets * added.total
                sums |= {name: targets * loss for name, loss in added.each.items()}
            (times * total / count).backward()
        return times * float(result.loss), sums if times else {}

    for start in range(0, len(local), pool.count):  # each replica holds the gradients of one
        jobs = zip(weights.replicas, local[start : start + pool.count], strict=False)
        for loss, sums in pool.map(run, jobs):
            loss_sum += loss
            _add(extra, sums)
        weights.collect()
    add_gradients(weights.master, parallel)
    all_sums = dict[str, float]()
    losses, extras = zip(*parallel.gather_parts((loss_sum, extra)), strict=True)
    for extra_ in extras:
        _add(all_sums, extra_)
    return sum(losses), count, all_sums


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        total[name] = total.get(name, 0) + value


def fit(
    objective: Objective[M],
    model: M,
    optimizer: Optimizer,
    *,
    steps: int,
    schedule: Schedule = lambda step, seconds: 1.0,
    clip: float = math.inf,
) -> list[StepStats]:
    """Trains `model` in memory, with the steps of `headway train`; returns their statistics. No file is used.

        class Copy(Objective[Decoder]):                               # of random bytes [B, T]
            def __init__(self, seed):
                self.seed = seed

            def batches(self, step):                                  # drawn by (seed, step)
                noise = torch.Generator().manual_seed(keyed(self.seed, step))
                ids = torch.randint(0, 256, (8, 65), generator=noise)
                return [Batch({"ids": ids[:, :-1]}, ids[:, 1:])]

        for seed in (0, 1, 2):
            model = build(spec, seed=seed)
            optimizer = Optimizer.single(model, torch.optim.Adam(model.parameters(), 4e-3))
            curve = [stats.loss for stats in fit(Copy(seed), model, optimizer, steps=200, clip=1.0)]

    `schedule` and `clip` are those of `Trainer`. `batches` is called once for each step, in order, so that an objective
    may instead keep a generator. Dropout draws from torch's generator: fork it (`torch.random.fork_rng`) and seed it
    for reproducible runs.

    Raises TrainingError if the loss or a gradient is not finite.
    """
    trainer = Trainer(objective, model, optimizer, schedule=schedule, clip=clip)
    return [trainer.step() for _ in range(steps)]


PIECE = 4096
"""Number of elements of a row that are summed at once: too few for torch to split the sum among threads."""
SCRATCH = 1 << 17
"""Number of float64 elements that are squared at once: they fit into the cache, in a buffer that is allocated once."""


def gradient_norm(
    parts: Iterable[Tensor], parallel: Parallel = ALONE, wholes: Iterable[Tensor] = ()
) -> Tensor:
    """Returns the norm by which gradients are clipped:

        |g| = sqrt(sum of g_i^2)            over all elements of all parameters, in float64

    Each row of a parameter's first axis is summed separately, and all row sums are added exactly (`math.fsum`: a single
    rounding), so that the bits depend neither on how parameters are sharded nor on the number of threads.

    `parts` are gradients of which the processes of the axes fsdp, expert and tp have different parts; `wholes` are
    gradients that are the same in all processes of the axes expert and tp (and sharded by fsdp only)."""
    local, mesh = (_squares(parts), _squares(wholes)), parallel.mesh
    gathered = parallel.gather(local) if mesh.fsdp * mesh.expert * mesh.tp > 1 else [local]
    squares = [gathered[rank][0] for rank in mesh.groups("fsdp", "expert", "tp")[0]]
    squares += [gathered[rank][1] for rank in mesh.groups("fsdp")[0]]
    return torch.tensor(math.sqrt(math.fsum(torch.cat(squares).tolist())), dtype=torch.float64)


def _squares(gradients: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.float64), *map(row_squares, gradients)])


@torch.no_grad()
def row_squares(x: Tensor) -> Tensor:
    """Returns the sum of squares of each row of the first axis, in float64, [rows]."""
    rows = x.flatten(1) if x.dim() > 1 else x.reshape(-1, 1)
    totals = torch.zeros(rows.shape[0], dtype=torch.float64)
    scratch = torch.empty(min(SCRATCH, rows.numel()), dtype=torch.float64)
    for pieces in rows.split(PIECE, 1):
        at_once = max(1, SCRATCH // max(1, pieces.shape[1]))
        for sums, piece in zip(totals.split(at_once), pieces.split(at_once), strict=True):
            squares = scratch[: piece.numel()].view(piece.shape).copy_(piece)
            sums += squares.square_().sum(1)
    return totals
