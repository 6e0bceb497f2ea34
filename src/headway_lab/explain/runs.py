"""Small training runs at equal budgets: several seeds, on text that every Python has.

Contenders of one seed are given the same rows of text in the same order, the same steps and learning rate, and the
same fresh weights as far as their shapes agree. Seeds come in turn, so that all contenders run under the same load of
the machine.

Legend: B rows, T tokens of a row, V = 256 bytes.
"""

import sysconfig
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.data import Batch
from headway.errors import DataError
from headway.models import Model, ModelSpec, build
from headway.nn import IGNORE_INDEX
from headway.train import Objective, fit
from headway.train.optimizer import Optimizer, learning_rate
from headway_lab.profiling import one_thread

VOCAB, MASK = 256, 0  # text of Python modules has no byte 0
HELD_OUT_SHARE, LEAST_BYTES = 16, 100_000
HELD_OUT_ROWS, WARM_UP, FLOOR, CLIP = 128, 0.1, 0.05, 1.0
MASKED = 0.15


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The budget of every contender: `steps` of Adam on `rows` x `tokens` fresh bytes each, `rate` at its peak,
    once for each of two or more `seeds`."""

    steps: int = 200
    rows: int = 8
    tokens: int = 64
    rate: float = 4e-3
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True, eq=False)
class Run:
    """One model trained: its loss of held-out text, in nats per byte, and the seconds of one core that it took."""

    model: Model
    loss: float
    seconds: float


Runs = Mapping[str, Sequence[Run]]  # of each contender, by seed


@cache
def text() -> tuple[Tensor, Tensor]:
    """Bytes of the top-level modules of Python's standard library: to train on, and held out (by a hash of names).

    Raises DataError where they are not there as files."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if not path.name.startswith("_sysconfigdata"):
            held_out = zlib.crc32(path.stem.encode()) % HELD_OUT_SHARE == 5
            parts[held_out].append(path.read_bytes())
    train, rest = (torch.tensor(list(b"".join(part)), dtype=torch.int64) for part in parts)
    if min(len(train), len(rest)) < LEAST_BYTES:
        raise DataError(
            f"{sysconfig.get_paths()['stdlib']}: {len(train)} bytes of Python modules to train on and {len(rest)} "
            f"held out, {LEAST_BYTES} each are needed; run with a Python whose standard library is there as files"
        )
    return train, rest


def held_out_rows(tokens: int, rows: int | None = None) -> Tensor:
    """[rows, tokens + 1] bytes, evenly spread over the held-out text; the same for every seed and contender."""
    data = text()[1]
    starts = torch.linspace(0, len(data) - tokens - 1, rows or HELD_OUT_ROWS).long()
    return data.unfold(0, tokens + 1, 1)[starts]


def batch_of(ids: Tensor, causal: bool, noise: torch.Generator) -> Batch:
    """Rows [B, T + 1]: each byte after the first from those before it (decoders), or hidden ones from the others
    (encoders; 15 % of the bytes, drawn from `noise`, become `MASK`)."""
    inputs = ids[:, :-1]
    if causal:
        return Batch({"ids": inputs}, ids[:, 1:])
    hidden = torch.rand(inputs.shape, generator=noise) < MASKED
    hidden[:, 0] = True  # at least one in a row
    return Batch({"ids": inputs.masked_fill(hidden, MASK)}, inputs.masked_fill(~hidden, IGNORE_INDEX))


class BytePrediction(Objective[Model]):
    """Random rows of the training text, drawn from `seed`, and the loss of their bytes."""

    def __init__(self, budget: Budget, seed: int, causal: bool) -> None:
        self.budget, self.causal = budget, causal
        self.noise = torch.Generator().manual_seed(seed)

    def batches(self, step: int) -> list[Batch]:
        data, tokens = text()[0], self.budget.tokens
        start = torch.randint(len(data) - tokens - 1, (self.budget.rows,), generator=self.noise)
        return [batch_of(data.unfold(0, tokens + 1, 1)[start], self.causal, self.noise)]


@torch.no_grad()
def mean_loss(model: Model, batch: Batch) -> float:
    """The loss of a batch, nats per predicted byte."""
    output = model.eval()(**batch.inputs, targets=batch.targets)
    return float(output.nats / output.tokens)


def held_out_loss(model: Model, tokens: int) -> float:
    """The loss of the held-out rows, nats per predicted byte."""
    rows, noise = held_out_rows(tokens), torch.Generator().manual_seed(0)
    return mean_loss(model, batch_of(rows, model.spec.causal, noise))


def train(spec: ModelSpec, budget: Budget, seed: int) -> Run:
    """One model after its budget: Adam (0.9, 0.95), warm-up, half a cosine down, gradients clipped to norm 1."""
    model, objective = build(spec, seed=seed), BytePrediction(budget, seed, spec.causal)
    adam = Optimizer.single(model, torch.optim.Adam(model.parameters(), budget.rate, betas=(0.9, 0.95)))

    def schedule(step: int, seconds: float) -> float:
        return learning_rate((step + 1) / budget.steps, warmup=WARM_UP, floor=FLOOR)

    began = time.process_time()
    fit(objective, model, adam, steps=budget.steps, schedule=schedule, clip=CLIP)
    seconds = time.process_time() - began
    return Run(model, held_out_loss(model, budget.tokens), seconds)


def contend(specs: Mapping[str, ModelSpec], budget: Budget) -> dict[str, tuple[Run, ...]]:
    """Every contender with every seed, in the order of the seeds, on one thread."""
    with one_thread():
        turns = [[train(spec, budget, seed) for spec in specs.values()] for seed in budget.seeds]
    return dict(zip(specs, zip(*turns, strict=True), strict=True))


def small(**fields: Any) -> ModelSpec:
    """The decoder that contenders are variants of: LLaMA's block, embeddings scaled as those of 2017 (so that what is
    added to them does not drown them)."""
    usual = {"width": 64, "layers": 2, "heads": 4, "hidden": 176, "vocab": VOCAB, "trained_context": 64}
    scales = {"init_std": usual["width"] ** -0.5, "embedding_scale": usual["width"] ** 0.5}
    return ModelSpec.of(**{"family": "llama", **usual, **scales, **fields})
