"""The place of the norm, and what it does to gradients in depth. (Xiong et al. 2020, theorem 1.)"""

import math
from functools import cache
from itertools import product

import torch
from torch import Tensor, nn

from headway.draw import BLUE, GREY, RED
from headway.nn import Attention, Block, FeedForward, LayerNorm
from headway.nn.block import Order
from headway_lab.explain.report import Figure, Report, Rows, label_axes, label_ticks, panels
from headway_lab.profiling import normal

DEPTHS, WIDTH, HEADS, TOKENS, ROWS, SEEDS = (4, 8, 16, 32), 64, 4, 16, 4, (0, 1, 2)
ORDERS: tuple[Order, ...] = ("pre", "post")

FORMULA = """post   x_(l+1) = norm(x_l + f(x_l))     (2017)            every step back passes through a norm
pre    x_(l+1) = x_l + f(norm(x_l))     (GPT-2, LLaMA)    x_L = x_0 + sum of all f: |x_l| grows, its norm divides by it
gradient of the last layer's weights, untrained, L layers:   post: the same for every L      pre: falls as 1 / sqrt(L)
(so the 2017 order starts with large steps however deep it is, and needs a warm-up; with pre, depth pays for itself)"""


def run() -> Report:
    """Same weights in both orders: the blocks against the two formulas, and gradients layer by layer."""
    rows = []
    for order, depth in product(ORDERS, DEPTHS):
        norms, growths = zip(*(measure(depth, order, seed) for seed in SEEDS), strict=True)
        first, *_, last = torch.stack(norms).log().mean(0).exp().tolist()
        rows.append(
            {
                "order": order,
                "layers L": depth,
                "|dL/dW|, first layer": first,
                "|dL/dW|, last layer": last,
                "last x sqrt(L)": last * math.sqrt(depth),
                "|x_L| / |x_0|": sum(growths) / len(growths),
                "from the formula": agreement(order),
            }
        )
    return judge(rows)


def stack(depth: int, order: Order, seed: int) -> tuple[list[Block], Tensor]:
    """Blocks of Xavier weights, and tokens [B, T, M], in float64; equal for both orders."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = ((Attention(WIDTH, HEADS), FeedForward(WIDTH, 4 * WIDTH)) for _ in range(depth))
        blocks = [Block(*own, lambda: LayerNorm(WIDTH), order).double() for own in parts]
        for parameter in nn.ModuleList(blocks).parameters():
            if parameter.dim() == 2:
                nn.init.xavier_normal_(parameter)
        return blocks, torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64)


@cache
def measure(depth: int, order: Order, seed: int) -> tuple[Tensor, float]:
    """|dL/dW| of `mlp.down_proj` in every layer [depth], and |x_L| / |x_0| before the last norm of the model.

    L is a random direction of the output, which ends with a norm in both orders."""
    blocks, start = stack(depth, order, seed)
    x = nn.Sequential(*blocks)(start)
    growth = float(x.detach().norm() / start.norm())
    out = nn.functional.layer_norm(x, (WIDTH,)) if order == "pre" else x
    (out * normal(*out.shape, seed=seed)).sum(-1).mean().backward()
    weights = [block.get_parameter("mlp.down_proj.weight") for block in blocks]
    return torch.stack([w.grad.norm() for w in weights if w.grad is not None]), growth


@torch.no_grad()
def agreement(order: Order) -> float:
    """Largest difference of one block from its formula, written out."""
    (block, *_), x = stack(1, order, SEEDS[0])
    f, g, first, second = block.self_attn, block.mlp, block.input_layernorm, block.post_attention_layernorm
    assert second is not None
    if order == "pre":
        middle = x + f(first(x))
        expected = middle + g(second(middle))
    else:
        middle = first(x + f(x))
        expected = second(middle + g(middle))
    return float((block(x) - expected).abs().max())


def judge(rows: Rows) -> Report:
    """The verdict: the last layer's gradient stays with depth in the post order and falls as 1/sqrt(L) in the pre."""
    shallow, deep = (
        {row["order"]: row["|dL/dW|, last layer"] for row in rows if row["layers L"] == depth}
        for depth in (DEPTHS[0], DEPTHS[-1])
    )
    first = {row["order"]: row["|dL/dW|, first layer"] for row in rows if row["layers L"] == DEPTHS[-1]}
    fall = {order: shallow[order] / deep[order] for order in ORDERS}
    expected = math.sqrt(DEPTHS[-1] / DEPTHS[0])
    return Report(
        rows=tuple(rows),
        seen=(
            abs(fall["post"] - 1) < 0.25
            and abs(fall["pre"] / expected - 1) < 0.25
            and max(row["from the formula"] for row in rows) == 0
        ),
        setting=(
            f"width {WIDTH}, {HEADS} heads, {ROWS} x {TOKENS} random tokens, Xavier weights, untrained, geometric mean "
            f"of seeds {SEEDS}"
        ),
        finding=(
            f"both orders are their formulas to the bit. From {DEPTHS[0]} to {DEPTHS[-1]} layers the last layer's "
            f"gradient falls {fall['pre']:.2f}-fold with the norm before (1/sqrt(L) says {expected:.2f}) and "
            f"{fall['post']:.2f}-fold with the norm after, where it is {deep['post'] / deep['pre']:.1f} times as "
            f"large at {DEPTHS[-1]} layers; the first layer's is {first['pre'] / deep['pre']:.1f} (before) and "
            f"{first['post'] / deep['post']:.1f} (after) times the last one's: it does not vanish in either"
        ),
    )


def draw(figure: Figure, report: Report) -> None:
    """Left: gradients by layer in the deepest stack. Right: the last layer's gradient, by depth."""
    left, right = panels(figure, 9.5, 3.8)
    deepest, layers = DEPTHS[-1], range(1, DEPTHS[-1] + 1)
    names = ("norm before (pre)", "norm after (post)")
    for order, colour, name in zip(ORDERS, (BLUE, RED), names, strict=True):
        norms = torch.stack([measure(deepest, order, seed)[0] for seed in SEEDS])
        left.fill_between(layers, norms.amin(0), norms.amax(0), color=colour, alpha=0.2, linewidth=0)
        left.semilogy(layers, norms.log().mean(0).exp(), color=colour, label=name)
        last = [row["|dL/dW|, last layer"] for row in report.rows if row["order"] == order]
        right.loglog(DEPTHS, last, "o-", color=colour, label=name)
        if order == "pre":
            falling = [last[0] * (DEPTHS[0] / d) ** 0.5 for d in DEPTHS]
            right.loglog(DEPTHS, falling, "--", color=GREY, label="1 / √L")
    legend = {"fontsize": 9}
    label_axes(left, f"{deepest} layers, untrained", "layer", "|dL/dW| (band: seeds)", legend)
    label_axes(right, "the last layer", "layers L", "|dL/dW|", legend)
    label_ticks(right, DEPTHS)
    for axes in (left, right):
        label_ticks(axes, (1, 2, 4, 8), "y")
