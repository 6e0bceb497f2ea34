"""The placement of the norm, and its effect on gradients with depth. (Xiong et al. 2020, theorem 1.)"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from headway.nn import Attention, Block, FeedForward, LayerNorm
from headway.nn.block import Order
from headway.nn.norms import QKNorm
from headway_lab.explain.figures import curves, panels
from headway_lab.explain.report import Report, Row, Rows
from headway_lab.explain.spread import gap
from headway_lab.profiling import normal, power

DEPTHS, WIDTH, HEADS, TOKENS, ROWS, SEEDS = (4, 8, 16, 32), 64, 4, 16, 4, tuple(range(6))
CLOSE = 0.2
ORDERS: tuple[Order, ...] = ("pre", "post")


def run(*, seeds: Sequence[int] = SEEDS) -> Iterator[Row]:
    """Yields, for the same weights in both orders, the blocks' distance from the two formulas, and gradients by
    layer."""
    for order, depth, seed in product(ORDERS, DEPTHS, seeds):
        norms, growth = measure(depth, order, seed)
        yield {
            "order": order,
            "layers L": depth,
            "seed": seed,
            "|dL/dW|, first layer": norms[0],
            "|dL/dW|, last layer": norms[-1],
            "last x sqrt(L)": norms[-1] * math.sqrt(depth),
            "|x_L| / |x_0|": growth,
            "from the formula": agreement(order),
        }


def stack(depth: int, order: Order, seed: int, qk_norm: QKNorm = "none") -> tuple[list[Block], Tensor]:
    """Returns blocks with Xavier weights, and tokens [B, T, M], in float64; equal for all orders."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = (
            (Attention(WIDTH, HEADS, qk_norm=qk_norm), FeedForward(WIDTH, 4 * WIDTH)) for _ in range(depth)
        )
        blocks = [Block(*pair, lambda: LayerNorm(WIDTH), order).double() for pair in parts]
        for parameter in nn.ModuleList(blocks).parameters():
            if parameter.dim() == 2:
                nn.init.xavier_normal_(parameter)
        return blocks, torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64)


def measure(depth: int, order: Order, seed: int) -> tuple[list[float], float]:
    """Returns |dL/dW| of `mlp.down_proj` in every layer, and |x_L| / |x_0| before the last norm of the model.

    L is a random direction of the output, which ends with a norm in both orders."""
    blocks, start = stack(depth, order, seed)
    x = nn.Sequential(*blocks)(start)
    growth = float(x.detach().norm() / start.norm())
    out = nn.functional.layer_norm(x, (WIDTH,)) if order == "pre" else x
    (out * normal(*out.shape, seed=seed)).sum(-1).mean().backward()
    weights = [block.get_parameter("mlp.down_proj.weight") for block in blocks]
    return [float(w.grad.norm()) for w in weights if w.grad is not None], growth


@torch.no_grad()
def agreement(order: Order) -> float:
    """Returns the largest difference of one block from its formula, written out."""
    (block, *_), x = stack(1, order, SEEDS[0])
    f, g, first, second = block.self_attn, block.mlp, block.input_layernorm, block.post_attention_layernorm
    assert first is not None
    assert second is not None
    assert g is not None
    if order == "pre":
        middle = x + f(first(x))
        expected = middle + g(second(middle))
    else:
        middle = first(x + f(x))
        expected = second(middle + g(middle))
    return float((block(x) - expected).abs().max())


def judge(rows: Rows) -> Report:
    """Returns the verdict: the last layer's gradient does not depend on depth in the post order and falls as 1/sqrt(L)
    in the pre order."""
    seeds, deep = tuple(dict.fromkeys(row["seed"] for row in rows)), max(row["layers L"] for row in rows)
    powers = {order: [exponent(rows, order, seed) for seed in seeds] for order in ORDERS}
    pre, post = (
        gap(powers[order], [expected] * len(seeds)) for order, expected in zip(ORDERS, (-0.5, 0), strict=True)
    )
    difference = gap(powers["pre"], powers["post"])
    share = {
        order: [
            row["|dL/dW|, first layer"] / row["|dL/dW|, last layer"]
            for row in rows
            if row["order"] == order and row["layers L"] == deep
        ]
        for order in ORDERS
    }
    return Report(
        rows=tuple(rows),
        claims={
            "formulas": max(row["from the formula"] for row in rows) == 0,
            "pre": pre.within(CLOSE),
            "post": post.within(CLOSE),
            "differ": difference.lower,
            "first": min(min(ratios) for ratios in share.values()) > 0.2,
        },
        values={
            "deep": deep,
            "pre": pre,
            "post": post,
            "power": pre.mean - 0.5,
            "share": {order: min(ratios) for order, ratios in share.items()},
        },
        highlight=tuple(i for i, row in enumerate(rows) if row["seed"] == seeds[0]),
    )


def exponent(rows: Rows, order: Order, seed: int) -> float:
    """Returns the p of |dL/dW| = c L^p in the last layer, for one seed."""
    group = [row for row in rows if (row["order"], row["seed"]) == (order, seed)]
    return power([row["layers L"] for row in group], [row["|dL/dW|, last layer"] for row in group])


FORMS = {"pre": "o blue", "post": "x red"}
AXES: dict[str, Any] = {"by": "order", "log": "xy"}
draw = panels(
    curves("layers L", FORMS, "the last layer (a mark a seed)", "|dL/dW|", of="|dL/dW|, last layer", **AXES),
    curves("layers L", FORMS, "times √L: level for 1 / √L", of="last x sqrt(L)", **AXES),
    sharey=True,
)
