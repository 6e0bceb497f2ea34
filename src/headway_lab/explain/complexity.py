"""Self-attention compared with recurrence, convolution and windows. (Vaswani et al. 2017, table 1.)"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.errors import ConfigError
from headway_lab.explain.figures import Figure, curves, panels
from headway_lab.explain.report import Report, Row, Rows
from headway_lab.profiling import flops

SEED = 0

Layer = Callable[[Tensor, list[Tensor], int], Tensor]


def attention(x: Tensor, w: list[Tensor], depth: int) -> Tensor:
    """Returns softmax(x x^T / sqrt(d), causal) x: only the two products of attention."""
    scores = (x @ x.T) * x.shape[-1] ** -0.5
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    return torch.mm(scores.masked_fill(future, -torch.inf).softmax(-1), x)


def recurrent(x: Tensor, w: list[Tensor], depth: int) -> Tensor:
    """Returns h_t = tanh(h_(t-1) U + x_t W), computed one token after the other."""
    state, out = torch.zeros_like(x[0]), []
    for token in x:
        state = torch.tanh(state[None] @ w[0] + token[None] @ w[1])[0]
        out.append(state)
    return torch.stack(out)


def one_recurrent_step(x: Tensor, w: list[Tensor], depth: int) -> Tensor:
    """Returns a layer with the dependencies of a single step: every state on the one before and on its own input."""
    return torch.tanh(F.pad(x, (0, 0, 1, 0))[:-1] @ w[0] + x @ w[1])


def convolution(x: Tensor, w: list[Tensor], depth: int, k: int, dilation: int = 1) -> Tensor:
    """Returns a causal convolution over k tokens, each with its own matrix; the tokens are dilation^depth apart."""
    step = dilation**depth
    padded = F.pad(x.T[None], (step * (k - 1), 0))
    return torch.tanh(F.conv1d(padded, torch.stack(w[:k], -1), dilation=step))[0].T


def restricted(x: Tensor, w: list[Tensor], depth: int, r: int) -> Tensor:
    """Returns attention to the last r keys, which are gathered."""
    keys = F.pad(x, (0, 0, r - 1, 0)).unfold(0, r, 1)  # [n, d, r]
    inside = torch.arange(len(x))[:, None] + torch.arange(r) >= r - 1
    scores = torch.bmm(x[:, None], keys)[:, 0] * x.shape[-1] ** -0.5
    return torch.bmm(scores.masked_fill(~inside, -torch.inf).softmax(-1)[:, None], keys.mT)[:, 0]


Sizes = Callable[[int, int], tuple[int, int, int]]


def layers_of(k: int, r: int) -> dict[str, tuple[Layer, Layer, Sizes]]:
    """Returns, by name, the layer, the layer of a single step, and the formulas: multiply-adds, products in a chain,
    path."""
    undilated, dilated = partial(convolution, k=k), partial(convolution, k=k, dilation=k)
    windowed = partial(restricted, r=r)
    return {
        "self-attention": (attention, attention, lambda n, d: (2 * n * n * d, 2, 1)),
        "recurrent": (recurrent, one_recurrent_step, lambda n, d: (2 * n * d * d, n, n - 1)),
        "convolution": (undilated, undilated, lambda n, d: (k * n * d * d, 1, math.ceil((n - 1) / (k - 1)))),
        "convolution, dilated": (dilated, dilated, lambda n, d: (k * n * d * d, 1, dilated_path(n, k))),
        "restricted attention": (
            windowed,
            windowed,
            lambda n, d: (2 * r * n * d, 2, math.ceil((n - 1) / (r - 1))),
        ),
    }


def dilated_path(n: int, k: int) -> int:
    """Returns the smallest l with k^l >= n: log_k n, rounded up."""
    return next(depth for depth in range(n) if k**depth >= n)


def run(*, n: int = 64, d: int = 64, k: int = 3, r: int = 8) -> Iterator[Row]:
    """Yields, for n / 4, n / 2 and n tokens of widths d / 2 and d, the operations counted by torch while each layer
    runs, the products in a chain from its autograd graph, and the path by reachability.

    Raises ConfigError for fewer than 8 tokens, or a width, kernel or window below 2."""
    if n < 8 or min(d, k, r) < 2:
        raise ConfigError(
            f"explain complexity: n must be at least 8, and d, k and r at least 2; got n={n}, d={d}, k={k}, r={r}"
        )
    for (name, (layer, step, sizes)), tokens, width in product(
        layers_of(k, r).items(), (n // 4, n // 2, n), (d // 2, d)
    ):
        formula, waits, path = sizes(tokens, width)
        yield {
            "layer": name,
            "n": tokens,
            "d": width,
            "multiply-adds": counted(layer, tokens, width, k),
            "formula": formula,
            "products in a chain": chain(layer, tokens, k),
            "chain, formula": waits,
            "path": hops(step, tokens, k),
            "path, formula": path,
        }


def counted(layer: Layer, n: int, d: int, k: int) -> int:
    """Returns the multiply-adds of the matrix products and convolutions that the layer runs."""
    return flops(partial(layer, *_inputs(n, d, k), 0))[0] // 2


def chain(layer: Layer, n: int, k: int) -> int:
    """Returns the largest number of matrix products and convolutions on a path through the graph of the layer's last
    output."""
    x, w = _inputs(n, 4, k)
    root = layer(x.requires_grad_(), w, 0)[-1].grad_fn
    longest: dict[object, int] = {None: 0}
    stack = [root]
    while stack:
        node = stack[-1]
        parents = [] if node is None else [parent for parent, _ in node.next_functions]
        if unvisited := [parent for parent in parents if parent not in longest]:
            stack += unvisited
            continue
        is_product = node is not None and node.name().startswith(("Mm", "Bmm", "Convolution"))
        longest.setdefault(stack.pop(), is_product + max((longest[parent] for parent in parents), default=0))
    return longest[root]


def hops(step: Layer, n: int, k: int) -> int:
    """Returns the number of stacked layers after which every output depends on every input before it."""
    reached = torch.eye(n)
    for depth in range(n):
        reached = ((mask(step, n, k, depth) @ reached) > 0).float()
        if reached.tril().sum() == n * (n + 1) / 2:
            return depth + 1
    raise AssertionError("a token never reaches a later one")


def mask(step: Layer, n: int, k: int, depth: int) -> Tensor:
    """Returns 0/1 [n, n]: whether output i of one layer depends on input j, by gradient."""
    x, w = _inputs(n, 4, k)
    jacobian = torch.autograd.functional.jacobian(lambda x: step(x, w, depth).sum(-1), x)
    assert isinstance(jacobian, Tensor)
    return (jacobian.abs().sum(-1) > 0).float()


def _inputs(n: int, d: int, k: int) -> tuple[Tensor, list[Tensor]]:
    noise = torch.Generator().manual_seed(SEED)
    x = torch.randn(n, d, generator=noise, dtype=torch.float64)
    return x, list(torch.randn(max(k, 2), d, d, generator=noise, dtype=torch.float64) * d**-0.5)


def judge(rows: Rows) -> Report:
    """Returns the verdict: counts, chains and paths are those of the formulas, and which layer takes fewer operations
    when."""
    full, recurrence, _, dilated, windowed = FORMS
    row_at = {(row["layer"], row["n"], row["d"]): row for row in rows}
    sizes = sorted({(row["n"], row["d"]) for row in rows})
    n, d = sizes[-1]
    largest = {row["layer"]: row for row in rows if (row["n"], row["d"]) == (n, d)}
    work = {name: row["multiply-adds"] for name, row in largest.items()}

    def constant(column: str) -> bool:
        return len({row[column] for row in rows if row["layer"] == full}) == 1

    return Report(
        rows=tuple(rows),
        claims={
            "operations": all(r["multiply-adds"] == r["formula"] for r in rows),
            "chains": all(r["products in a chain"] == r["chain, formula"] for r in rows),
            "paths": all(r["path"] == r["path, formula"] for r in rows),
            "constant": constant("products in a chain") and constant("path"),
            "fewer": all(
                (row_at[full, *size]["multiply-adds"] < row_at[recurrence, *size]["multiply-adds"])
                == (size[0] < size[1])
                for size in sizes
            ),
        },
        values={
            "least": sizes[0],
            "most": (n, d),
            "full": largest[full],
            "recurrence": largest[recurrence],
            "near": largest[windowed],
            "wide": largest[dilated],
            "work": work[full] / work[recurrence],
            "near_work": work[windowed] / work[full],
            "wide_work": work[dilated] / work[full],
        },
        highlight=tuple(i for i, row in enumerate(rows) if row["d"] == d and row["n"] >= n // 2),
    )


FORMS = dict(zip(layers_of(2, 2), ("o- blue", "o- red", "o- orange", "o- grey", "o- green"), strict=True))


def draw(figure: Figure, report: Report) -> None:
    """Draws operations, products in a chain, and path against n, at the larger width."""
    width = max(report.column("d"))
    rows = tuple(row for row in report.rows if row["d"] == width)
    beside = {"loc": "center left", "bbox_to_anchor": (1.2, 0.5)}
    log = partial(curves, "n", FORMS, by="layer", log="xy")
    panels(
        log(f"operations, d = {width}", of="multiply-adds", legend=None),
        log("longest chain of products", of="products in a chain", legend=None),
        log("from the first token to the last", of="path", legend=beside),
        layout="AB;C.",
    )(figure, replace(report, rows=rows))
