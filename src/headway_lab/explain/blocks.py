"""From the decoder block of 2017 to LLaMA's, one difference at a time.

(Vaswani et al. 2017; Zhang and Sennrich 2019: RMSNorm; Shazeer 2020: SwiGLU; Touvron et al. 2023: LLaMA.)
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn

from headway.models import ModelSpec
from headway.models.difference import Difference, differences
from headway.nn import RMSNorm
from headway.positions import Rotary
from headway_lab.explain.contests import draw_losses, gaps, losses, rows
from headway_lab.explain.figures import panels
from headway_lab.explain.report import Report, Table
from headway_lab.explain.runs import VOCAB, Budget, Runs, contend, small
from headway_lab.explain.spread import gap, log_gap
from headway_lab.profiling import in_turn, one_thread

BUDGET, HIDDEN, KV_HEADS = Budget(), 176, 2
NORM_ROWS, NORM_WIDTH, REPEATS, EQUAL = 2048, 512, 15, 0.02
LLAMA, ALONE = "+ GQA = LLaMA", "without feed-forward"


def ladder() -> dict[str, ModelSpec]:
    """Returns the rungs from 2017 to LLaMA, with equal width, depth and feed-forward parameters, and one without
    feed-forward; without dropout."""
    changes: dict[str, dict[str, Any]] = {
        "pre-norm": {"order": "pre", "final_norm": True},
        "RMSNorm": {"norm": "rms", "norm_bias": False},
        "rotary": {"positions": Rotary(pairing="halves")},
        "SwiGLU": {"activation": "silu", "gated": True, "hidden": HIDDEN, "mlp_bias": False},
        "GQA = LLaMA": {"kv_heads": KV_HEADS},
    }
    specs = {"2017": small(family="transformer", hidden=3 * HIDDEN // 2, dropout=0.0)}
    for name, change in changes.items():
        specs[f"+ {name}"] = replace(list(specs.values())[-1], **change)
    return {**specs, ALONE: replace(specs[LLAMA], hidden=0)}


def base_and_llama() -> tuple[Difference, ...]:
    """Returns the differences between the base Transformer of 2017 (its decoder) and a LLaMA of its width."""
    sizes: dict[str, Any] = {"vocab": VOCAB, "width": 512, "layers": 6, "heads": 8}
    llama = ModelSpec.of("llama", hidden=1376, kv_heads=KV_HEADS, **sizes)
    return differences(ModelSpec.of("transformer", hidden=2048, **sizes), llama)


def norm_times() -> dict[str, list[float]]:
    """Returns the microseconds of one core for a forward and backward over [NORM_ROWS, NORM_WIDTH], round by round."""
    norms: dict[str, nn.Module] = {
        "LayerNorm, torch's fused": nn.LayerNorm(NORM_WIDTH),
        "RMSNorm, torch's": nn.RMSNorm(NORM_WIDTH),
        "RMSNorm, headway's (as LLaMA's code rounds)": RMSNorm(NORM_WIDTH),
    }
    x = torch.randn(NORM_ROWS, NORM_WIDTH, requires_grad=True)
    steps = {name: lambda norm=norm: norm(x).sum().backward() for name, norm in norms.items()}
    with one_thread():
        seconds_of = in_turn(steps, REPEATS, time.process_time)
    return {name: [1e6 * seconds for seconds in times] for name, times in seconds_of.items()}


def run(*, seeds: Sequence[int] = BUDGET.seeds, steps: int = BUDGET.steps) -> Report:
    """Trains every rung, times norms, and compares the two specs."""
    budget = replace(BUDGET, seeds=tuple(seeds), steps=steps)
    return judge(contend(ladder(), budget), norm_times(), budget)


def judge(runs: Runs, times: Mapping[str, Sequence[float]], budget: Budget) -> Report:
    """Returns the verdict: whether LLaMA's block has a lower loss than that of 2017; and the change at each rung, each
    as its own claim."""
    table = rows(runs, budget.seeds)
    rung_gaps, first = gaps(table), next(iter(runs.values()))
    whole_gap = gap(losses(runs[LLAMA]), losses(first))
    layer_norm, *rms = times.values()
    faster = {name: log_gap(us, layer_norm) for name, us in zip(list(times)[1:], rms, strict=True)}
    norm_rows = [(name, round(median(us)), median(us) / median(layer_norm)) for name, us in times.items()]
    return Report(
        rows=tuple(table),
        claims={
            "whole": whole_gap.lower,
            "pre-norm": rung_gaps["+ pre-norm"].lower,
            "RMSNorm": rung_gaps["+ RMSNorm"].within(EQUAL),
            **{("time", name): change.lower for name, change in faster.items()},
            "rotary": rung_gaps["+ rotary"].lower,
            "SwiGLU": rung_gaps["+ SwiGLU"].lower,
            "shared": rung_gaps[LLAMA].higher,
            "alone": rung_gaps[ALONE].higher,
        },
        values={
            "budget": budget,
            "whole": whole_gap,
            "apart": {name.removeprefix("+ "): change for name, change in rung_gaps.items()},
            "faster": {name: change.factor for name, change in faster.items()},
            "differences": Table(("aspect", "base", "llama"), base_and_llama()),
            "norms": Table(("norm", "us", "of LayerNorm"), norm_rows),
        },
    )


draw = panels(draw_losses("from the block of 2017 to LLaMA's (each against the one above)"))
