"""Rotary frequencies trained from the usual initial values: how far they move, and what it is worth.

(Su et al. 2021 tried it, saw no noticeable change of the frequencies or of the result, and fixed them.)
"""

import copy
import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from headway.models import Model
from headway.positions import Rotary
from headway_lab.explain.contests import losses
from headway_lab.explain.figures import bars, curves, panels
from headway_lab.explain.report import Report, Table
from headway_lab.explain.runs import Budget, Run, Runs, contend, held_out_loss, small
from headway_lab.explain.spread import gap
from headway_lab.profiling import one_thread

BUDGET, NOTICED = Budget(), 0.5


def run(*, seeds: Sequence[int] = BUDGET.seeds, steps: int = BUDGET.steps) -> Report:
    """Compares trained with fixed frequencies; and measures the drift of each, and the trained model without its
    drift."""
    budget = replace(BUDGET, seeds=tuple(seeds), steps=steps)
    rotary = {"fixed": Rotary(pairing="halves"), "trained": Rotary(pairing="halves", trainable=True)}
    runs = contend({name: small(positions=scheme) for name, scheme in rotary.items()}, budget)
    with one_thread():
        losses_without_drift = [without_drift(run) for run in runs["trained"]]
    return judge(runs, torch.stack([drifts(run) for run in runs["trained"]]), losses_without_drift, budget)


def drifts(run: Run) -> Tensor:
    """Returns the drift of each frequency, [layers, d/2], in radians per position."""
    return torch.stack([offset.detach() for offset in offsets(run.model)])


def offsets(model: Model) -> list[nn.Parameter]:
    """Returns the trained frequency offsets of each layer, [d/2] each."""
    return [p for name, p in model.named_parameters() if name.endswith(".frequency_offset")]


@torch.no_grad()
def without_drift(run: Run) -> float:
    """Returns the held-out loss with every drift reset to 0."""
    model = copy.deepcopy(run.model)
    for offset in offsets(model):
        offset.zero_()
    return held_out_loss(model, BUDGET.tokens)


def judge(runs: Runs, drift: Tensor, back: Sequence[float], budget: Budget) -> Report:
    """Returns the verdict: whether frequencies move, whether the model uses it, and whether the loss is lower, each
    against the spread over seeds. `drift` [seeds, layers, d/2]."""
    fixed, trained = losses(runs["fixed"]), losses(runs["trained"])
    trained_gap, drift_gap = gap(trained, fixed), gap(trained, back)
    start = Rotary(pairing="halves").frequencies(2 * drift.shape[-1])
    rows = []
    for i, frequency in enumerate(start.tolist()):
        angle_drift = drift[..., i].double()
        gained = (angle_drift.abs().mean(-1) * budget.tokens).tolist()  # for each seed
        size = float(angle_drift.abs().mean())
        rows.append(
            {
                "pair": i,
                "start (rad)": frequency,
                "drift, mean": float(angle_drift.mean()),
                "spread": float(angle_drift.std()),
                "|drift|": size,
                "|drift| / start": size / frequency,
                "over a row (rad)": size * budget.tokens,
                **{f"seed {seed}": angle for seed, angle in zip(budget.seeds, gained, strict=True)},
                "noticed": gap(gained, [NOTICED] * len(gained)).higher,
            }
        )
    moved = [row["pair"] for row in rows if row["noticed"]]
    return Report(
        rows=tuple(rows),
        claims={"moves": bool(moved), "used": drift_gap.lower, "worth": trained_gap.lower},
        values={
            "budget": budget,
            "apart": trained_gap,
            "kept": drift_gap,
            "moved": moved,
        },
        picture=Table(
            ("loss", "mean", *(f"seed {seed}" for seed in budget.seeds)),
            [
                (name, *(f"{x:.4f}" for x in (statistics.fmean(values), *values)))
                for name, values in (("fixed", fixed), ("trained", trained), ("trained, put back", back))
            ],
        ),
    )


ABOVE = f"radians (line: seeds; not grey: shown to lie above {NOTICED}, dashed)"
draw = panels(
    curves(
        "pair",
        {"start (rad)": "o- grey", "|drift|": "o- orange"},
        "frequencies, and how far they moved",
        log="y",
    ),
    bars(
        ("pair",),
        "over a row (rad)",
        "angle gained",
        ABOVE,
        pale=lambda row: not row["noticed"],
        line=NOTICED,
    ),
)
