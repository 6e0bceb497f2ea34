"""Four placements of norms, and their effect on the residual stream with depth. (Xiong et al. 2020; Gemma Team 2024,
"Gemma 2", section 2; OLMo Team 2024, "2 OLMo 2 Furious", section 3.2.)"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

import torch
from torch import nn

from headway.nn.block import Order
from headway.nn.norms import QKNorm
from headway_lab.explain.figures import curves, panels
from headway_lab.explain.report import Report, Row, Rows
from headway_lab.explain.residual_order import WIDTH, stack
from headway_lab.profiling import normal, power

DEPTHS, SEEDS = (4, 8, 16, 32), (0, 1, 2)
LARGE, CLOSE = 3.0, 0.1
KINDS: Mapping[str, tuple[Order, QKNorm, bool]] = {
    "pre": ("pre", "none", False),
    "pre, scaled": ("pre", "none", True),
    "post": ("post", "none", False),
    "sandwich": ("sandwich", "none", False),
    "output": ("output", "none", False),
    "output, q and k": ("output", "all", False),
}
"""The order of each kind, its norms on queries and keys, and whether its residual_scale is (2 L)^-0.5."""


def run(*, seeds: Sequence[int] = SEEDS) -> Iterator[Row]:
    """Yields, for each kind and depth, the stream's growth with Xavier weights and with weights LARGE times as large,
    and the gradients of the first and the last layer; means over the seeds."""
    for name, depth in product(KINDS, DEPTHS):
        results = [measure(name, depth, seed) for seed in seeds]
        yield {
            "norms": name,
            "layers L": depth,
            **{key: fmean(result[key] for result in results) for key in results[0]},
        }


def measure(name: str, depth: int, seed: int) -> dict[str, float]:
    """Returns the columns of one stack, whose output ends with a norm in all orders."""
    order, qk_norm, scaled = KINDS[name]
    blocks, start = stack(depth, order, seed, qk_norm)
    for block in blocks:
        block.residual_scale = (2 * depth) ** -0.5 if scaled else 1.0
    blocks_in_order = nn.Sequential(*blocks)
    x = blocks_in_order(start)
    out = x if order == "post" else nn.functional.layer_norm(x, (WIDTH,))
    (out * normal(*out.shape, seed=seed)).sum(-1).mean().backward()
    gradients = [block.get_parameter("mlp.down_proj.weight").grad for block in blocks]
    first, last = (float(g.norm()) for g in (gradients[0], gradients[-1]) if g is not None)
    with torch.no_grad():
        for parameter in blocks_in_order.parameters():
            if parameter.dim() == 2:
                parameter.mul_(LARGE)
        large = blocks_in_order(start)
    return {
        "|x_L| / |x_0|": float(x.detach().norm() / start.norm()),
        "with large weights": float(large.norm() / start.norm()),
        "sqrt(1 + 2 L)": math.sqrt(1 + 2 * depth),
        "|dL/dW|, first layer": first,
        "|dL/dW|, last layer": last,
    }


def judge(rows: Rows) -> Report:
    """Returns the verdict: a norm on what is added fixes the growth of the stream, a norm on the stream prevents it;
    the last layer's gradient falls as the stream grows, and the first one's rises if scores come from unnormalized
    queries and keys."""
    growth, large = "|x_L| / |x_0|", "with large weights"
    kinds = {name: [row for row in rows if row["norms"] == name] for name in KINDS}
    deep = {name: group[-1] for name, group in kinds.items()}
    added = [row for name in ("sandwich", "output", "output, q and k") for row in kinds[name]]
    first, last = (
        {
            name: power([r["layers L"] for r in group], [r[f"|dL/dW|, {which} layer"] for r in group])
            for name, group in kinds.items()
        }
        for which in ("first", "last")
    )
    return Report(
        rows=tuple(rows),
        claims={
            "post": max(abs(row[column] - 1) for row in kinds["post"] for column in (growth, large)) < CLOSE,
            "added": all(
                abs(row[c] / row["sqrt(1 + 2 L)"] - 1) < CLOSE for row in added for c in (growth, large)
            ),
            "weights": deep["pre"][large] > LARGE * deep["pre"][growth],
            "scaled": deep["pre, scaled"][growth] < (1 + CLOSE) * kinds["pre, scaled"][0][growth],
            "gradients": max(last[name] for name in ("pre", "sandwich", "output")) < -0.3,
            "level": abs(last["post"]) < 0.15,
            "scores": first["output"] > 2 * max(abs(first["sandwich"]), abs(first["output, q and k"])),
        },
        values={
            "deep": deep["pre"]["layers L"],
            "growth": {name: row[growth] for name, row in deep.items()},
            "large": {name: row[large] for name, row in deep.items()},
            "of_first": first,
            "of_last": last,
        },
        highlight=tuple(
            i
            for i, row in enumerate(rows)
            if row["layers L"] in (rows[0]["layers L"], deep["pre"]["layers L"])
        ),
    )


FORMS = dict(zip(KINDS, ("o- blue", "o- grey", "o- red", "o- green", "x- orange", "x-- violet"), strict=True))
AXES: dict[str, Any] = {"by": "norms", "log": "xy"}
LEGEND = {"loc": "upper left", "fontsize": 8}
draw = panels(
    curves("layers L", FORMS, "the stream", "|x_L| / |x_0|", of="|x_L| / |x_0|", legend=None, **AXES),
    curves(
        "layers L",
        FORMS,
        f"the stream, weights {LARGE:g} times",
        of="with large weights",
        legend=None,
        **AXES,
    ),
    curves(
        "layers L", FORMS, "gradient, last layer", "|dL/dW|", of="|dL/dW|, last layer", legend=None, **AXES
    ),
    curves("layers L", FORMS, "gradient, first layer", of="|dL/dW|, first layer", legend=LEGEND, **AXES),
    layout="AB;CD",
)
