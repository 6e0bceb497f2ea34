"""Linear attention with rotary positions, trained as a masked language model. (Su et al. 2021, section 3.3 and figure
3, right; Katharopoulos et al. 2020.)"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from headway.attention.linear_attention import LinearAttentionSpec
from headway.errors import ConfigError
from headway.models import ModelSpec, build
from headway.nn import IGNORE_INDEX
from headway.positions import NoPositions, Rotary
from headway_lab.explain.contests import draw_losses, losses, rows
from headway_lab.explain.figures import curves, panels
from headway_lab.explain.report import Report, Row, Rows, Table
from headway_lab.explain.runs import VOCAB, Budget, Runs, batch_of, contend, held_out_rows, small
from headway_lab.explain.spread import gap
from headway_lab.profiling import fastest, one_thread, power, saved_bytes

BUDGET, LENGTHS, REPEATS = Budget(steps=300), (512, 1024, 2048, 4096, 8192), 3
PAIRS = 2**20  # largest number of token pairs whose weights are kept
FORMS = {
    "softmax, dense": "o- grey",
    "softmax": "o- blue",
    "linear": "o- orange",
    "linear, cosine": "o- green",
}
SLOPE = 0.1


def contenders() -> dict[str, ModelSpec]:
    """Returns RoFormer's block with softmax, and with linear attention instead; the last contender has no positions."""
    shape = {"family": "roformer", "hidden": 256, "dropout": 0.0, "attention_dropout": 0.0}
    softmax = small(**shape, positions=Rotary(pairing="adjacent"))
    return {
        "softmax": softmax,
        "linear": softmax.with_mixer(LinearAttentionSpec()),
        "linear, cosine": softmax.with_mixer(LinearAttentionSpec("cosine")),
        "linear, no positions": small(**shape, positions=NoPositions()).with_mixer(LinearAttentionSpec()),
    }


def unigram() -> float:
    """Returns the entropy of single held-out bytes, in nats: the loss of guessing without context."""
    counts = torch.bincount(held_out_rows(BUDGET.tokens).flatten(), minlength=VOCAB).double()
    share = counts[counts > 0] / counts.sum()
    return float(-(share * share.log()).sum())


def step_cost(name: str, spec: ModelSpec, length: int, backend: str = "auto") -> Row:
    """Returns the cost of a training step on one row: the time of one core (the fastest of some), and the bytes that
    its forward keeps."""
    model = build(spec, seed=0, backend=backend)
    inputs, targets = batch_of(held_out_rows(length, 1), spec.causal, torch.Generator().manual_seed(0))
    hidden = targets != IGNORE_INDEX
    sizes = set()

    def forward() -> torch.Tensor:
        return F.cross_entropy(model(**inputs, logits_for=hidden), targets[hidden])

    def step() -> None:
        loss, size = saved_bytes(forward, model, integers=True)
        loss.backward()
        sizes.add(size)

    ms = 1e3 * fastest(step, REPEATS, time.process_time)
    (size,) = sizes
    return {"attention": name, "tokens": length, "ms a step": ms, "MiB kept": size / 2**20}


def measure(lengths: Sequence[int] = LENGTHS) -> list[Row]:
    """Returns the cost of a step at each length; "softmax, dense" keeps the weights of all pairs, so it ends at
    `PAIRS`."""
    specs = contenders()
    with one_thread():
        short = [n for n in lengths if n * n <= PAIRS]
        dense = [step_cost("softmax, dense", specs["softmax"], n, "dense") for n in short]
        recomputed = ("softmax", "linear", "linear, cosine")
        return dense + [step_cost(name, specs[name], n) for name in recomputed for n in lengths]


def run(
    *, seeds: Sequence[int] = BUDGET.seeds, steps: int = BUDGET.steps, context: int = LENGTHS[-1]
) -> Report:
    """Trains the four contenders, and measures the cost of a step as rows grow up to `context`."""
    budget = replace(BUDGET, seeds=tuple(seeds), steps=steps)
    lengths = [n for n in LENGTHS if n <= context]
    if len(lengths) < 2:
        raise ConfigError(f"explain linear-training: --context {context} must be at least {LENGTHS[1]}")
    return judge(contend(contenders(), budget), measure(lengths), unigram(), budget)


def slopes(costs: Rows, name: str) -> tuple[float, float]:
    """Returns the slopes of time and of bytes, between the two longest rows of `name`."""
    _, tokens, times, sizes = zip(*(row.values() for row in costs if row["attention"] == name), strict=True)
    return power(tokens[-2:], times[-2:]), power(tokens[-2:], sizes[-2:])


def judge(runs: Runs, costs: Rows, blind: float, budget: Budget) -> Report:
    """Returns the verdict: linear attention with rotary learns more than byte frequencies, and the bytes that it keeps
    grow linearly."""
    table = rows(runs, budget.seeds, "softmax")
    values = {name: losses(trained) for name, trained in runs.items()}
    below = gap(values["linear"], [blind] * len(values["linear"]))
    slope = {name: slopes(costs, name) for name in FORMS}
    rotary_gap = gap(values["linear"], values["linear, no positions"])
    return Report(
        rows=(*table, *({"contender": "", **row} for row in costs)),
        highlight=tuple(range(len(table))),
        picture=Table(tuple(costs[0]), [tuple(row.values()) for row in costs]),
        claims={
            "learns": below.lower,
            "turned": rotary_gap.lower,
            "bytes": abs(slope["linear"][1] - 1) < SLOPE,
            "softmax": gap(values["linear"], values["softmax"]).higher,
        },
        values={"budget": budget, "blind": blind, "below": below, "turned": rotary_gap, "slope": slope},
    )


COSTS: dict[str, Any] = {"by": "attention", "log": "xy"}
draw = panels(
    draw_losses("masked language model"),
    curves("tokens", FORMS, "a step, time of one core (rough)", "ms", of="ms a step", **COSTS, legend=None),
    curves("tokens", FORMS, "kept for the backward", "MiB", of="MiB kept", **COSTS),
    layout="AA;BC",
)
