"""Small training runs at equal budgets: one switch at a time, several seeds in turn.

Contenders of one seed are given the same rows of text in the same order, the same steps and rate, and the same
fresh weights as far as their shapes agree; seeds come in turn, so that what else the machine does meets all of them.

Legend: B rows, T tokens of a row, V = 256 bytes.
"""

import math
import statistics
import sysconfig
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.draw import BLUE, GREY, ORANGE
from headway.errors import ConfigError, DataError
from headway.models import ModelSpec, build, cost
from headway.models.build import Model
from headway.train.schedule import learning_rate

VOCAB, MASK = 256, 0  # text of Python modules has no byte 0
HELD_OUT_SHARE, LEAST_BYTES = 16, 100_000
HELD_OUT_ROWS, WARM_UP, FLOOR, CLIP = 128, 0.1, 0.05, 1.0
MASKED = 0.15
# Two-sided 95 % points of Student's t with 1, 2, .. degrees of freedom.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What every contender is given: `steps` of Adam on `rows` x `tokens` fresh bytes each, `rate` at its peak,
    once for each of two or more `seeds`."""

    steps: int = 200
    rows: int = 8
    tokens: int = 64
    rate: float = 4e-3
    seeds: tuple[int, ...] = (0, 1, 2, 3)

    def __post_init__(self) -> None:
        if len(set(self.seeds)) < 2:
            raise ConfigError(f"Budget: a spread needs two different seeds or more, got {self.seeds}")

    def __str__(self) -> str:
        return (
            f"{self.steps} steps of {self.rows} x {self.tokens} bytes of Python's standard library, "
            f"rate {self.rate:g}, seeds {', '.join(map(str, self.seeds))}"
        )


@dataclass(frozen=True, eq=False)
class Run:
    """One model trained.

    loss      of held-out text, nats per byte
    curve     training loss of each step
    seconds   of one core, for training
    trained   bytes in all rows that were trained on, digest their CRC-32 in order
    """

    model: Model
    loss: float
    curve: tuple[float, ...]
    seconds: float
    trained: int
    digest: int


@dataclass(frozen=True)
class Gap:
    """How far losses of one contender lie above those of another with the same seeds.

    mean    of the differences seed by seed
    bound   t s / sqrt(n): s their standard deviation, t the 95 % point for n - 1 degrees of freedom
    """

    mean: float
    bound: float

    @property
    def seen(self) -> bool:
        """Whether the mean differs from 0 by more than the bound: one time in twenty where nothing differs."""
        return abs(self.mean) > self.bound

    @property
    def higher(self) -> bool:
        return self.seen and self.mean > 0

    @property
    def lower(self) -> bool:
        return self.seen and self.mean < 0

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.bound:.3f}, {'seen' if self.seen else 'not seen'}"


def gap(losses: Sequence[float], base: Sequence[float]) -> Gap:
    """`losses` against `base`, seed by seed."""
    assert len(losses) == len(base) >= 2, "a spread needs two seeds or more, the same for both"
    apart = [a - b for a, b in zip(losses, base, strict=True)]
    error = statistics.stdev(apart) / math.sqrt(len(apart))
    return Gap(statistics.fmean(apart), T_95[min(len(apart) - 2, len(T_95) - 1)] * error)


@cache
def text() -> tuple[Tensor, Tensor]:
    """Bytes of the top-level modules of Python's standard library: to train on, and held out (by a hash of names).

    Raises DataError where they are not there as files."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if not path.name.startswith("_sysconfigdata"):
            held = zlib.crc32(path.stem.encode()) % HELD_OUT_SHARE == 5
            parts[held].append(path.read_bytes())
    train, held_out = (torch.tensor(list(b"".join(part)), dtype=torch.int64) for part in parts)
    if min(len(train), len(held_out)) < LEAST_BYTES:
        raise DataError(
            f"{sysconfig.get_paths()['stdlib']}: {len(train)} bytes of Python modules to train on and {len(held_out)} "
            f"held out, {LEAST_BYTES} each are needed; run with a Python whose standard library is there as files"
        )
    return train, held_out


def rows_at(data: Tensor, start: Tensor, tokens: int) -> Tensor:
    """[B, tokens] bytes of `data` from each start [B]."""
    return data[start[:, None] + torch.arange(tokens)]


def held_out_rows(tokens: int, rows: int = HELD_OUT_ROWS) -> Tensor:
    """[rows, tokens + 1] bytes, evenly spread over the held-out text; the same for every seed and contender."""
    held = text()[1]
    return rows_at(held, torch.linspace(0, len(held) - tokens - 1, rows).long(), tokens + 1)


def loss_of(model: Model, ids: Tensor, noise: torch.Generator) -> Tensor:
    """Mean loss of rows [B, T + 1] in nats: of each byte after the first given those before it (decoders), or of
    hidden ones given the others (encoders; 15 % of the bytes, drawn from `noise`, become `MASK`)."""
    if model.spec.causal:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    inputs = ids[:, :-1]
    hidden = torch.rand(inputs.shape, generator=noise) < MASKED
    hidden[:, 0] = True  # at least one in a row
    return F.cross_entropy(model(inputs.masked_fill(hidden, MASK), logits_for=hidden), inputs[hidden])


@torch.no_grad()
def held_out_loss(model: Model, tokens: int) -> float:
    """Of the held-out rows, nats per byte."""
    model.eval()
    noise = torch.Generator().manual_seed(0)
    return float(loss_of(model, held_out_rows(tokens), noise))


def train(spec: ModelSpec, budget: Budget, seed: int) -> Run:
    """One model after its budget: Adam (0.9, 0.95), warm-up, half a cosine down, gradients clipped to norm 1."""
    model, noise = build(spec, seed=seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), budget.rate, betas=(0.9, 0.95))
    data, curve, digest, began = text()[0], [], 0, time.process_time()
    for step in range(budget.steps):
        start = torch.randint(len(data) - budget.tokens - 1, (budget.rows,), generator=noise)
        ids = rows_at(data, start, budget.tokens + 1)
        digest = zlib.crc32(ids.numpy().tobytes(), digest)
        for group in optimizer.param_groups:
            group["lr"] = budget.rate * learning_rate((step + 1) / budget.steps, warmup=WARM_UP, floor=FLOOR)
        loss = loss_of(model, ids, noise)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        curve.append(loss.item())
    seconds = time.process_time() - began
    trained = budget.steps * budget.rows * budget.tokens
    return Run(model, held_out_loss(model, budget.tokens), tuple(curve), seconds, trained, digest)


@contextmanager
def one_thread() -> Iterator[None]:
    """Models of this size gain nothing from a second thread, and on one their sums do not depend on the machine's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def contend(specs: Mapping[str, ModelSpec], budget: Budget) -> dict[str, tuple[Run, ...]]:
    """Every contender with every seed, in the order of the seeds, on one thread."""
    found: dict[str, list[Run]] = {name: [] for name in specs}
    with one_thread():
        for seed in budget.seeds:
            for name, spec in specs.items():
                found[name].append(train(spec, budget, seed))
    return {name: tuple(runs) for name, runs in found.items()}


def small(**fields: Any) -> ModelSpec:
    """The decoder that contenders are variants of: LLaMA's block, embeddings scaled as those of 2017 (so that what is
    added to them does not drown them)."""
    usual = {"width": 64, "layers": 2, "heads": 4, "hidden": 176, "vocab": VOCAB, "trained_context": 64}
    scales = {"init_std": usual["width"] ** -0.5, "embedding_scale": usual["width"] ** 0.5}
    return ModelSpec.of(**{"family": "llama", **usual, **scales, **fields})


def losses(runs: Sequence[Run]) -> list[float]:
    """Of every seed."""
    return [run.loss for run in runs]


def columns(budget: Budget) -> tuple[str, ...]:
    """Names of what `rows` holds."""
    seeds = tuple(f"seed {seed}" for seed in budget.seeds)
    return ("contender", "parameters", "loss", "spread", "against", "gap", "bound", "seen", "seconds", *seeds)


def rows(runs: Mapping[str, Sequence[Run]], against: Mapping[str, str]) -> list[tuple[Any, ...]]:
    """A line for each contender: mean and standard deviation of its losses, its gap to the contender that `against`
    names, mean seconds of one core for a run, and the losses one by one."""
    found: list[tuple[Any, ...]] = []
    for name, own in runs.items():
        loss, base = losses(own), against.get(name)
        apart = None if base is None else gap(loss, losses(runs[base]))
        told = (None,) * 3 if apart is None else (apart.mean, apart.bound, apart.seen)
        seconds = statistics.fmean(run.seconds for run in own)
        size = cost.parameter_count(own[0].model.spec)
        found.append(
            (name, size, statistics.fmean(loss), statistics.stdev(loss), base, *told, seconds, *loss)
        )
    return found


def gap_in(line: Sequence[Any]) -> Gap:
    """The gap that a line of `rows` holds."""
    return Gap(line[5], line[6])


def told(claims: Mapping[str, bool]) -> str:
    """Each claim with what this run says of it."""
    return "; ".join(f"{claim}: {'seen' if held else 'not seen'}" for claim, held in claims.items())


def draw_losses(axes: Any, lines: Sequence[Sequence[Any]], seeds: int) -> None:
    """A bar from the least to the greatest loss for each contender, a dot for each seed, a line at the mean; what
    differs from what it is measured against is in colour."""
    for at, line in enumerate(lines):
        colour = BLUE if line[5] is None else (ORANGE if line[7] else GREY)
        values = line[-seeds:]
        axes.plot([min(values), max(values)], [at, at], color=colour, alpha=0.35, linewidth=6)
        axes.plot(values, [at] * seeds, "o", color=colour, markersize=4)
        axes.plot([line[2]] * 2, [at - 0.3, at + 0.3], color=colour, linewidth=2)
    axes.set_yticks(range(len(lines)), [line[0] for line in lines])
    axes.invert_yaxis()
    axes.set_xlabel(
        "held-out loss (nats per byte); dots: seeds, orange: gap seen, grey: not seen", fontsize=9
    )
    axes.grid(visible=False, axis="y")
