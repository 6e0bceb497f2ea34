"""The rows of all experts of a layer in one pass, forward and backward, for training in float32 on a CPU.

The input, hidden layer and output of an expert stay in the processor's cache: rows are gathered for one expert after
the other, and its output is added to the result at once. Of the K expert rows of each token only the outputs of gate
and up are kept for the backward; a tensor of all rows sorted by expert never exists (`docs/log.md` says what that
saves).

Legend: R rows (tokens), M width of the model, E experts, K of them for each row, F width of an expert's hidden layer.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headway.native import interface, rows
from headway.nn.feedforward import FeedForward
from headway.nn.fused import again, plain_gated
from headway.nn.products import forward_product, input_product, weight_product
from headway.nn.weights.base import needs_gradient
from headway.nn.weights.plain import Plain

MATRICES = 3
"""The number of matrices of an expert: gate and up [F, M], down [M, F]."""


def expert_rows(
    experts: Iterable[nn.Module], x: Tensor, weights: Tensor, order: Tensor, counts: Tensor
) -> Tensor | None:
    """Returns y [R, M] with y[r] = sum over the experts e of row r of weight * down_e(act(gate_e x[r]) * up_e x[r]).

    Returns None if no gradients are recorded, and if this would not compute the same as the experts: for other dtypes
    and devices, autocast, adapters, other forms of weights, biases, hooks, dropout, activations without a kernel, no
    gate.

    x [R, M]; `weights` [R, K]; `order` sorts the R K pairs of row and expert by expert: pair order[i] belongs to row
    order[i] // K; `counts` [E]: the number of pairs of each expert. The outputs of a row's experts are added in the
    order of the experts' numbers. An expert without rows gets gradients of 0."""
    if not rows.runs(x) or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return None
    acts: set[str] = set()
    matrices: list[Tensor] = []
    for expert in experts:
        if not isinstance(expert, FeedForward) or (gate_up_down := _matrices(expert)) is None:
            return None
        acts.add(expert.act)
        matrices += gate_up_down
    if not (len(acts) == 1 and rows.runs(x, *matrices) and needs_gradient(x, *matrices)):
        return None
    y: Tensor = _ExpertRows.apply(*acts, counts.tolist(), order, x, weights, *matrices)  # type: ignore[no-untyped-call]
    return y


def _matrices(expert: FeedForward) -> list[Tensor] | None:
    """Returns gate, up and down of an expert, or None if it computes anything beyond them."""
    layers = [expert.gate_proj, expert.up_proj, expert.down_proj]
    if expert.act_fn is not None or expert.act not in interface.ACTIVATIONS:
        return None
    if expert.scale != 1 or expert.gate_scale != 1 or (expert.training and expert.drop.p):
        return None
    if any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in expert.modules()):
        return None
    matrices: list[Tensor] = []
    for layer in layers:
        if layer is None or layer.bias is not None or layer.share is not None or layer.active:
            return None
        if not isinstance(layer.kept, Plain):
            return None
        matrices.append(layer.kept.w)
    return matrices


def plain_expert_rows(
    act: str, counts: Sequence[int], order: Tensor, x: Tensor, weights: Tensor, *matrices: Tensor
) -> Tensor:
    """Computes `expert_rows` in torch's operations."""
    y = torch.zeros_like(x)
    for _, _, row, w, (gate, up, down) in _experts(counts, order, weights, matrices):
        hidden = plain_gated(x[row] @ gate.T, x[row] @ up.T, act)
        y = y.index_add(0, row, w * (hidden @ down.T))
    return y


def _experts(
    counts: Sequence[int], order: Tensor, weights: Tensor, matrices: Sequence[Tensor]
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Sequence[Tensor]]]:
    """Yields, for each expert, where its pairs are in `order`, the pairs, their rows and weights [pairs, 1], and its
    matrices.

    counts (2, 0, 1) of order (4, 1, 3): slice(0, 2) with (4, 1), slice(2, 2) with none, slice(2, 3) with (3)."""
    begin, w, each = 0, weights.flatten(), weights.shape[1]
    for e, count in enumerate(counts):
        at = slice(begin, begin + count)
        pairs = order[at]
        yield at, pairs, pairs // each, w[pairs, None], matrices[MATRICES * e : MATRICES * (e + 1)]
        begin += count


class _ExpertRows(torch.autograd.Function):
    """With g = Wg x, u = Wu x, h = act(g) u and y = w Wd h, given dy:

    dh = Wd^T dy          (for w = 1)     dw = dh . h
    dg, du = those of h, given w dh       dx = Wg^T dg + Wu^T du
    dWd = dy (w h)^T      dWg = dg x^T    dWu = du x^T"""

    @staticmethod
    def forward(
        ctx: Any, act: str, counts: list[int], order: Tensor, x: Tensor, weights: Tensor, *matrices: Tensor
    ) -> Tensor:
        y = torch.zeros_like(x)
        gates, ups = (x.new_empty(len(order), matrices[0].shape[0]) for _ in "gu")
        for at, pairs, row, w, (gate, up, down) in _experts(counts, order, weights, matrices):
            if len(pairs):
                x_expert = x.index_select(0, row)
                gates[at], ups[at] = forward_product(x_expert, gate), forward_product(x_expert, up)
                hidden = rows.gate(act, gates[at], ups[at]).mul_(w)
                y.index_add_(0, row, forward_product(hidden, down))
        ctx.save_for_backward(order, x, weights, gates, ups, *matrices)
        ctx.act, ctx.counts = act, counts
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (dy,) = grads
        order, x, weights, gates, ups, *matrices = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient itself will be differentiated
            return (
                None,
                None,
                None,
                *again(partial(plain_expert_rows, ctx.act, ctx.counts, order), (x, weights, *matrices), dy),
            )
        wants = ctx.needs_input_grad[5:]
        dx, dw = torch.zeros_like(x), torch.empty_like(weights.flatten())
        d_matrices: list[Tensor | None] = []
        for e, (at, pairs, row, w, (gate, up, down)) in enumerate(
            _experts(ctx.counts, order, weights, matrices)
        ):
            needed = wants[MATRICES * e : MATRICES * (e + 1)]
            if not len(pairs):
                d_matrices += [
                    torch.zeros_like(m) if want else None
                    for m, want in zip((gate, up, down), needed, strict=True)
                ]
                continue
            x_expert, dy_of = x.index_select(0, row), dy.index_select(0, row)
            dh, h = input_product(dy_of, down), torch.empty_like(gates[at])
            dg, du = rows.gate_backward(ctx.act, dh * w, gates[at], ups[at], h)
            assert du is not None
            dw[pairs] = torch.linalg.vecdot(dh, h)
            dx.index_add_(0, row, input_product(dg, gate).add_(input_product(du, up)))
            sides = ((dg, x_expert), (du, x_expert), (dy_of, h.mul_(w)))
            d_matrices += [
                weight_product(a, b) if want else None for (a, b), want in zip(sides, needed, strict=True)
            ]
        return None, None, None, dx, dw.view_as(weights), *d_matrices
