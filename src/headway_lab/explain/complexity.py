"""Self-attention beside recurrence, convolution and windows. (Vaswani et al. 2017, table 1.)"""

import math
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headway.draw import BLUE, GREEN, GREY, ORANGE, RED
from headway_lab.explain.report import Figure, Report, Rows, label_axes, panels

LENGTHS, WIDTHS, KERNEL, NEAR, SEED = (16, 32, 64), (32, 64), 3, 8, 0
COLOURS = (BLUE, RED, ORANGE, GREY, GREEN)

FORMULA = """n tokens of width d, kernels of k tokens, windows of r keys; multiply-adds of a layer without projections:
self-attention       2 n^2 d     1 step       path 1                 every token meets every other at once
recurrent            2 n d^2     n steps      path n - 1             h_t = tanh(h_(t-1) U + x_t W)
convolution          k n d^2     1 step       path (n-1)/(k-1)       with dilations 1, k, k^2, ..: log_k n
restricted           2 r n d     1 step       path (n-1)/(r-1)       self-attention on the last r keys
path: layers (or steps) until the last output depends on the first input"""

Layer = Callable[[Tensor, list[Tensor], int], Tensor]


def attention(x: Tensor, w: list[Tensor], depth: int) -> Tensor:
    """softmax(x x^T / sqrt(d), causal) x: the two products of attention alone."""
    scores = (x @ x.T) * x.shape[-1] ** -0.5
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    return torch.mm(scores.masked_fill(future, -torch.inf).softmax(-1), x)


def recurrent(x: Tensor, w: list[Tensor], depth: int) -> Tensor:
    """h_t = tanh(h_(t-1) U + x_t W), one token after the other."""
    state, out = torch.zeros_like(x[0]), []
    for token in x:
        state = torch.tanh(state[None] @ w[0] + token[None] @ w[1])[0]
        out.append(state)
    return torch.stack(out)


def one_recurrent_step(x: Tensor, w: list[Tensor], depth: int) -> Tensor:
    """What a single step connects: every state with the one before and with its own input."""
    return torch.tanh(F.pad(x, (0, 0, 1, 0))[:-1] @ w[0] + x @ w[1])


def convolution(x: Tensor, w: list[Tensor], depth: int, dilation: int = 1) -> Tensor:
    """k tokens, each with a matrix of its own: the last ones, or with steps of dilation^depth from layer to layer."""
    step = dilation**depth
    padded = F.pad(x.T[None], (step * (KERNEL - 1), 0))
    return torch.tanh(F.conv1d(padded, torch.stack(w, -1), dilation=step))[0].T


def restricted(x: Tensor, w: list[Tensor], depth: int) -> Tensor:
    """Attention to the last r keys, gathered."""
    keys = F.pad(x, (0, 0, NEAR - 1, 0)).unfold(0, NEAR, 1)  # [n, d, r]
    inside = torch.arange(len(x))[:, None] + torch.arange(NEAR) >= NEAR - 1
    scores = torch.bmm(x[:, None], keys)[:, 0] * x.shape[-1] ** -0.5
    return torch.bmm(scores.masked_fill(~inside, -torch.inf).softmax(-1)[:, None], keys.mT)[:, 0]


# The layer, what one step of it connects, and the formulas: multiply-adds, sequential steps, path.
Sizes = Callable[[int, int], tuple[int, int, int]]
LAYERS: dict[str, tuple[Layer, Layer, Sizes]] = {
    "self-attention": (attention, attention, lambda n, d: (2 * n * n * d, 1, 1)),
    "recurrent": (recurrent, one_recurrent_step, lambda n, d: (2 * n * d * d, n, n - 1)),
    "convolution": (
        convolution,
        convolution,
        lambda n, d: (KERNEL * n * d * d, 1, math.ceil((n - 1) / (KERNEL - 1))),
    ),
    "convolution, dilated": (
        convolution,
        partial(convolution, dilation=KERNEL),
        lambda n, d: (KERNEL * n * d * d, 1, math.ceil(math.log(n, KERNEL))),
    ),
    "restricted attention": (
        restricted,
        restricted,
        lambda n, d: (2 * NEAR * n * d, 1, math.ceil((n - 1) / (NEAR - 1))),
    ),
}


def run() -> Report:
    """Operations counted by torch while each layer runs, and paths found by gradients, for several n and d."""
    rows = []
    for (name, (layer, step, sizes)), n, d in product(LAYERS.items(), LENGTHS, WIDTHS):
        formula, steps, path = sizes(n, d)
        rows.append(
            {
                "layer": name,
                "n": n,
                "d": d,
                "multiply-adds": counted(layer, n, d),
                "formula": formula,
                "sequential steps": steps,
                "path": path,
                "path by gradient": hops(step, n) if d == WIDTHS[0] else None,
            }
        )
    return judge(rows)


def counted(layer: Layer, n: int, d: int) -> int:
    """Multiply-adds of the matrix products and convolutions that the layer runs."""
    x, w = _inputs(n, d)
    with FlopCounterMode(display=False) as counter:
        layer(x, w, 0)
    return int(counter.get_total_flops()) // 2


def hops(layer: Layer, n: int) -> int:
    """How many layers on top of each other it takes until d out[n-1] / d x[0] is not 0."""
    x, w = _inputs(n, 8)
    x.requires_grad_()
    y = x
    for depth in range(n):
        y = layer(y, w, depth)
        (gradient,) = torch.autograd.grad(y[-1].sum(), x, retain_graph=True)
        if gradient[0].any():
            return depth + 1
    raise AssertionError("the first token never reaches the last")


def _inputs(n: int, d: int) -> tuple[Tensor, list[Tensor]]:
    noise = torch.Generator().manual_seed(SEED)
    x = torch.randn(n, d, generator=noise, dtype=torch.float64)
    return x, list(torch.randn(KERNEL, d, d, generator=noise, dtype=torch.float64) * d**-0.5)


def judge(rows: Rows) -> Report:
    """The verdict: every count is its formula, and every path the one that gradients find."""
    right = [
        row["multiply-adds"] == row["formula"] and row["path by gradient"] in (None, row["path"])
        for row in rows
    ]
    n, d = LENGTHS[-1], WIDTHS[0]
    there = {row["layer"]: row for row in rows if (row["n"], row["d"]) == (n, d)}
    work, path, steps = (
        {name: row[column] for name, row in there.items()}
        for column in ("multiply-adds", "path by gradient", "sequential steps")
    )
    full, recurrence, _, wide, near = LAYERS
    return Report(
        rows=tuple(rows),
        seen=all(right),
        setting=f"n = {LENGTHS}, d = {WIDTHS}, k = {KERNEL}, r = {NEAR}, causal, float64, seed {SEED}",
        finding=(
            f"{sum(right)} of {len(rows)} counts and paths are those of the formulas. At n = {n}, d = {d} "
            f"attention takes {work[full] / work[recurrence]:g} times the operations of recurrence (n / d: fewer while "
            f"n < d) but {steps[full]} step instead of {steps[recurrence]}, and a path of {path[full]} instead of "
            f"{path[recurrence]}; windows of {NEAR} keys take {work[near] / work[full]:g} of the operations for a path "
            f"of {path[near]}, dilated convolutions {work[wide] / work[full]:g} for a path of {path[wide]}"
        ),
        highlight=tuple(i for i, row in enumerate(rows) if row["d"] == d and row["n"] in LENGTHS[-2:]),
    )


def draw(figure: Figure, report: Report) -> None:
    """Left: operations against n, at d = 512. Right: path length against n, with what gradients found."""
    left, right = panels(figure, 10.5, 4)
    width, lengths = 512, [2**i for i in range(4, 15)]
    for (name, (_, _, sizes)), colour in zip(LAYERS.items(), COLOURS, strict=True):
        work, _, path = zip(*(sizes(n, width) for n in lengths), strict=True)
        if name != "convolution, dilated":
            left.loglog(lengths, work, color=colour, label=name)
        right.loglog(lengths, path, color=colour, label=name)
        found = [row["path by gradient"] for row in report.rows if row["layer"] == name]
        right.plot(LENGTHS, [hop for hop in found if hop is not None], "o", color=colour, markersize=5)
    left.axvline(width, color=GREY, linestyle=":", linewidth=1)
    legend = {"fontsize": 8, "loc": "upper left"}
    label_axes(left, f"operations of one layer, d = {width}", "tokens n", "multiply-adds", legend)
    left.text(width * 1.1, left.get_ylim()[0] * 2, "n = d", fontsize=8, color=GREY)
    y = "layers or steps (dots: gradient)"
    label_axes(right, "path from the first token to the last", "tokens n", y, legend)
