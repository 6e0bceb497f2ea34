"""Attention of a tile of queries over blocks of keys, forward and backward: the inner step of every blocked backend.

Legend: B rows, K kv heads, G group, t queries, s keys of the block, D per head, Dv of v.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.attention.call import Call, split
from headway.partial import Partial
from headway.tokens import Tokens


def finite(t: Tensor) -> bool:
    """Returns whether t has neither NaN nor infinity, judged by its sum (if a finite sum overflows, that only costs
    a copy)."""
    return not t.numel() or bool(t.sum().isfinite())


@dataclass(frozen=True, eq=False)
class QueryTile:
    """A tile of queries: q [B, K, G, t, D] in the work dtype, their tokens and their slots [B|1, t]."""

    q: Tensor
    tokens: Tokens
    slots: Tensor


@dataclass(frozen=True, eq=False)
class KeyBlock:
    """A block of keys: k [B, K, s, D], v [B, K, s, Dv] in the work dtype, tokens, global slots [B|1, s].

    `mask` bool [B|1, 1, t, s] is None if every pair is visible. `finite` says that k and v have neither NaN nor
    infinity.
    """

    k: Tensor
    v: Tensor
    tokens: Tokens
    slots: Tensor
    mask: Tensor | None
    finite: bool

    def clean(self) -> tuple[Tensor, Tensor]:
        """Returns k and v; what no query of the block sees is set to 0 if it may be NaN or infinite."""
        if self.mask is None or self.finite:
            return self.k, self.v
        unseen = ~self.mask.any(-2).unsqueeze(-1)
        return self.k.masked_fill(unseen, 0.0), self.v.masked_fill(unseen, 0.0)


def _scores(call: Call, at: QueryTile, q: Tensor, k: Tensor, block: KeyBlock) -> Tensor:
    """Returns the scores [B, H, t, s] of q [B, K, G, t, D] and k [B, K, s, D] after all steps, -inf where masked."""
    s = _rows(q) @ k.transpose(-1, -2) * call.scale
    s = s.unflatten(2, (call.heads.group, -1)).flatten(1, 2)
    s = call.scored(s, q.flatten(1, 2), at.tokens, block.tokens)
    return s if block.mask is None else s.masked_fill(~block.mask, float("-inf"))


def _rows(x: Tensor) -> Tensor:
    """Joins the query heads of a kv head as rows of one product, [B, K, G, t, D] -> [B, K, G * t, D]."""
    return x.flatten(2, 3)


def tile_forward(call: Call, at: QueryTile, blocks: Sequence[KeyBlock]) -> Partial:
    """Returns the partial (out [B, H, t, Dv] in the work dtype, lse [B, H, t]) over disjoint blocks of keys."""
    batch, kv, group, t, _ = at.q.shape
    dtype = at.q.dtype
    # online softmax: sums are relative to exp(top), the largest score so far, and shrink when a block raises it
    top = at.q.new_full((batch, kv * group, t), float("-inf"))
    total = torch.zeros_like(top)
    out = at.q.new_zeros(batch, kv, group * t, call.keys[0].v.shape[-1])
    for block in blocks:
        k, v = block.clean()
        s = _scores(call, at, at.q, k, block)
        new = torch.maximum(top, s.amax(-1))
        safe = new.masked_fill(new == float("-inf"), 0.0)
        p = torch.exp(s - safe.unsqueeze(-1))
        shrink = torch.exp(top - safe)
        total = total * shrink + p.sum(-1)
        if call.dropout:
            p = p * call.dropped(at.slots, block.slots, dtype)
        out = out * _as_rows(shrink, kv) + p.unflatten(1, (kv, group)).flatten(2, 3) @ v
        top = new
    out = out / _as_rows(total.masked_fill(total == 0, 1.0), kv)
    return Partial(out.unflatten(2, (group, t)).flatten(1, 2), top + torch.log(total))


def _as_rows(x: Tensor, kv: int) -> Tensor:
    """Reshapes [B, H, t] to [B, K, G * t, 1]."""
    return split(x, 1, kv, -1).flatten(2, 3).unsqueeze(-1)


@dataclass(frozen=True, eq=False)
class ResultGradient:
    """The parts of the whole result that the backward of every block needs, for a tile of queries.

    lse [B, H, t] with 0 in place of -inf; d_out [B, K, G * t, Dv]; delta [B, H, t] = rowsum(dOut * Out) - dlse.
    """

    lse: Tensor
    d_out: Tensor
    delta: Tensor

    @staticmethod
    def of(call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor) -> "ResultGradient":
        dtype = call.work_dtype
        d = d_out.to(dtype)
        delta = (d * out.to(dtype)).sum(-1) - d_lse.to(dtype)
        rows: Tensor = call.grouped(d).flatten(2, 3)
        floor = lse == float("-inf")
        return ResultGradient(lse.to(dtype).masked_fill(floor, 0.0), rows, delta)


def tile_backward(
    call: Call, at: QueryTile, block: KeyBlock, result: ResultGradient
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Returns the gradients of one block: dq [B, K, G, t, D], dk [B, K, s, D], dv [B, K, s, Dv], and those of the
    scores' tensors.

    P = exp(S - lse),  dP = dOut V^T (times the dropout factors),  dS = P * (dP - delta): with the final lse and delta,
    every block is independent of the others.
    """
    kv, group, t = at.q.shape[1:4]
    k, v = block.clean()
    parameters = call.parameters
    if call.score:
        with torch.enable_grad():
            q_leaf, k_leaf = at.q.detach().requires_grad_(), k.detach().requires_grad_()
            leaves = [p.detach().requires_grad_(p.requires_grad) for p in parameters]
            s = _scores(call.with_parameters(leaves), at, q_leaf, k_leaf, block)
    else:
        s = _scores(call, at, at.q, k, block)
    p = torch.exp(s.detach() - result.lse.unsqueeze(-1))
    dp = (result.d_out @ v.transpose(-1, -2)).unflatten(2, (group, t)).flatten(1, 2)
    dropped = p
    if call.dropout:
        factor = call.dropped(at.slots, block.slots, p.dtype)
        dropped, dp = p * factor, dp * factor
    dv = dropped.unflatten(1, (kv, group)).flatten(2, 3).transpose(-1, -2) @ result.d_out
    ds = p * (dp - result.delta.unsqueeze(-1))
    if call.score:
        inputs = [q_leaf, k_leaf, *(leaf for leaf in leaves if leaf.requires_grad)]
        dq, dk, *d_leaves = torch.autograd.grad(s, inputs, ds, allow_unused=True)
        remaining = iter(d_leaves)
        grads = tuple(next(remaining) if p.requires_grad else None for p in parameters)
        return dq, dk, dv, grads
    rows = ds.unflatten(1, (kv, group)).flatten(2, 3)
    dq = (rows @ k * call.scale).unflatten(2, (group, t))
    return dq, rows.transpose(-1, -2) @ _rows(at.q) * call.scale, dv, tuple(None for _ in parameters)
