"""Small training runs with equal budgets and several seeds, on text that every Python installation has.

Contenders with the same seed get the same rows of text in the same order, the same steps and learning rate, and the
same initial weights as far as their shapes agree. Each seed trains all contenders in turn, so that all run under the
same load of the machine.

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
    """The budget of every contender: `steps` of Adam on `rows` x `tokens` fresh bytes each, with peak learning rate
    `rate`, once for each of two or more `seeds`."""

    steps: int = 200
    rows: int = 8
    tokens: int = 64
    rate: float = 4e-3
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True, eq=False)
class Run:
    """One trained model: its loss on held-out text, in nats per byte, and its training time in seconds of one core."""

    model: Model
    loss: float
    seconds: float


Runs = Mapping[str, Sequence[Run]]  # the runs of each contender, one per seed


@cache
def text() -> tuple[Tensor, Tensor]:
    """Returns the bytes of the top-level modules of Python's standard library: training text and held-out text (split
    by a hash of names).

    Raises DataError if the standard library does not exist as files."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if not path.name.startswith("_sysconfigdata"):
            held_out = zlib.crc32(path.stem.encode()) % HELD_OUT_SHARE == 5
            parts[held_out].append(path.read_bytes())
    train, held = (torch.tensor(list(b"".join(part)), dtype=torch.int64) for part in parts)
    if min(len(train), len(held)) < LEAST_BYTES:
        raise DataError(
            f"{sysconfig.get_paths()['stdlib']}: {len(train)} bytes of Python modules to train on and {len(held)} "
            f"held out, but {LEAST_BYTES} of each are needed; run with a Python whose standard library is source files"
        )
    return train, held


def held_out_rows(tokens: int, rows: int | None = None) -> Tensor:
    """Returns [rows, tokens + 1] bytes, evenly spread over the held-out text; the same for every seed and contender."""
    data = text()[1]
    starts = torch.linspace(0, len(data) - tokens - 1, rows or HELD_OUT_ROWS).long()
    return data.unfold(0, tokens + 1, 1)[starts]


def batch_of(ids: Tensor, causal: bool, noise: torch.Generator) -> Batch:
    """Returns rows [B, T + 1] as a batch: for decoders, each byte after the first is predicted from those before it;
    for encoders, 15 % of the bytes, drawn from `noise`, become `MASK` and are predicted from the others."""
    inputs = ids[:, :-1]
    if causal:
        return Batch({"ids": inputs}, ids[:, 1:])
    hidden = torch.rand(inputs.shape, generator=noise) < MASKED
    hidden[:, 0] = True  # at least one per row
    return Batch({"ids": inputs.masked_fill(hidden, MASK)}, inputs.masked_fill(~hidden, IGNORE_INDEX))


class BytePrediction(Objective[Model]):
    """The objective of predicting the bytes of random rows of the training text, drawn from `seed`."""

    def __init__(self, budget: Budget, seed: int, causal: bool) -> None:
        self.budget, self.causal = budget, causal
        self.noise = torch.Generator().manual_seed(seed)

    def batches(self, step: int) -> list[Batch]:
        data, tokens = text()[0], self.budget.tokens
        start = torch.randint(len(data) - tokens - 1, (self.budget.rows,), generator=self.noise)
        return [batch_of(data.unfold(0, tokens + 1, 1)[start], self.causal, self.noise)]


@torch.no_grad()
def mean_loss(model: Model, batch: Batch) -> float:
    """Returns the loss of a batch, in nats per predicted byte."""
    output = model.eval()(**batch.inputs, targets=batch.targets)
    return float(output.nats / output.tokens)


def held_out_loss(model: Model, tokens: int) -> float:
    """Returns the loss of the held-out rows, in nats per predicted byte."""
    rows, noise = held_out_rows(tokens), torch.Generator().manual_seed(0)
    return mean_loss(model, batch_of(rows, model.spec.causal, noise))


def train(spec: ModelSpec, budget: Budget, seed: int) -> Run:
    """Trains one model with its budget: Adam (0.9, 0.95), warm-up, half a cosine of decay, gradients clipped to norm
    1."""
    model, objective = build(spec, seed=seed), BytePrediction(budget, seed, spec.causal)
    adam = Optimizer.single(model, torch.optim.Adam(model.parameters(), budget.rate, betas=(0.9, 0.95)))

    def schedule(step: int, seconds: float) -> float:
        return learning_rate((step + 1) / budget.steps, warmup=WARM_UP, floor=FLOOR)

    began = time.process_time()
    fit(objective, model, adam, steps=budget.steps, schedule=schedule, clip=CLIP)
    seconds = time.process_time() - began
    return Run(model, held_out_loss(model, budget.tokens), seconds)


def contend(specs: Mapping[str, ModelSpec], budget: Budget) -> dict[str, tuple[Run, ...]]:
    """Trains every contender with every seed, in the order of the seeds, on one thread."""
    with one_thread():
        turns = [[train(spec, budget, seed) for spec in specs.values()] for seed in budget.seeds]
    return dict(zip(specs, zip(*turns, strict=True), strict=True))


def small(**fields: Any) -> ModelSpec:
    """Returns the decoder that contenders are variants of: LLaMA's block, with embeddings scaled as in 2017 (so that
    added positions do not drown them)."""
    defaults = {"width": 64, "layers": 2, "heads": 4, "hidden": 176, "vocab": VOCAB, "trained_context": 64}
    scales = {"init_std": defaults["width"] ** -0.5, "embedding_scale": defaults["width"] ** 0.5}
    return ModelSpec.of(**{"family": "llama", **defaults, **scales, **fields})
