"""The running sums of causal linear attention, block by block, and their gradient in memory linear in the length.

    num_i = sum_(j <= i) (q_i . k_j) v_j = (q K^T, j <= i) V inside the block  +  q_i S,   S = sum k_j v_j^T before it
    den_i = zq_i . sum_(j <= i) zk_j

with j in the document of i. In the backward the sums run from the right: R = sum q_i dnum_i^T over later queries.

Legend: N rows times kv heads, G query heads per kv head, T slots, C slots of a block, F features, E per value.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.errors import BackendError


@dataclass(frozen=True, eq=False)
class Block:
    """The slots of one step, and masks of their documents (all None if there is one document).

    same     bool [N|1, C, C]: j <= i, in one document
    head     [N|1, C, 1]: 1 for slots of the document that the block before ended with, which its sums belong to
    tail     [N|1, C, 1]: 1 for slots of the document that continues after the block
    whole    [N|1, 1, 1]: 1 if both are one document, so that sums pass through
    """

    at: slice
    same: Tensor | None = None
    head: Tensor | None = None
    tail: Tensor | None = None
    whole: Tensor | None = None

    def allowed(self, s: Tensor) -> Tensor:
        """Sets to 0, in place, the products s [N, G C, C] of queries and keys with j > i or in different documents;
        returns s."""
        n, _, c = s.shape
        by_head = s.view(n, -1, c, c)
        if self.same is None:
            by_head.tril_()
        else:
            by_head.mul_(self.same[:, None])
        return s

    def before(self, k: Tensor) -> Tensor:
        """Returns sum_(j <= i) k_j inside the block, k [N, C, F]."""
        return k.cumsum(1) if self.same is None else self.same.to(k.dtype) @ k

    def after(self, q: Tensor) -> Tensor:
        """Returns sum_(i >= j) q_i inside the block, q [N, C, F]."""
        return q.flip(1).cumsum(1).flip(1) if self.same is None else self.same.mT.to(q.dtype) @ q


def blocks(documents: Tensor | None, count: int, size: int, dtype: torch.dtype) -> Iterator[Block]:
    """Yields the blocks of `count` slots; in `documents` [N|1, T] each document is one run."""
    for begin in range(0, count, size):
        end = min(begin + size, count)
        at = slice(begin, end)
        if documents is None:
            yield Block(at)
            continue
        block = documents[:, at]
        no_document = torch.full_like(block[:, :1], -2)
        past = documents[:, begin - 1 : begin] if begin else block[:, :1]
        future = documents[:, end : end + 1] if end < count else no_document
        head, tail = block == past, block == future
        whole = past == future
        same = (block[:, :, None] == block[:, None, :]).tril_()
        yield Block(at, same, *(t[..., None].to(dtype) for t in (head, tail, whole)))


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    zq: Tensor,
    zk: Tensor,
    documents: Tensor | None,
    kv: Tensor,
    z: Tensor,
    size: int,
) -> tuple[Tensor, Tensor]:
    """Returns (num [N, G, T, E], den [N, G, T]) of q, zq [N, G, T, F] and k, zk [N, T, F], v [N, T, E].

    documents   [N|1, T] or None;  kv [N, F, E], z [N, F]: the sums over earlier keys, without gradient
    size        slots of a block, C; it does not change the result
    """
    out: tuple[Tensor, Tensor] = _Scan.apply(q, k, v, zq, zk, documents, kv, z, size)  # type: ignore[no-untyped-call]
    return out


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, ctx.size = inputs
        ctx.save_for_backward(*tensors)
        q, k, v, zq, zk, documents, kv, z = tensors
        n, g, t, _ = q.shape
        num, den = q.new_empty(n, g, t, v.shape[-1]), q.new_empty(n, g, t)
        kv, z = kv.clone(), z.clone().unsqueeze(1)
        for block in blocks(documents, t, ctx.size, q.dtype):
            at, head = block.at, block.head
            qc, kc, vc, zc = q[:, :, at], k[:, at], v[:, at], zk[:, at]
            inside = torch.bmm(block.allowed(torch.bmm(qc.flatten(1, 2), kc.mT)), vc)
            num[:, :, at] = inside.baddbmm_(_only(head, qc).flatten(1, 2), kv).view(n, g, -1, v.shape[-1])
            sums = block.before(zc) + _only(head, z)
            den[:, :, at] = (zq[:, :, at] * sums.unsqueeze(1)).sum(-1)
            kv, z = _onwards(block, kv, z, kc, vc, zc)
        return num, den

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise BackendError(
                'second derivatives of linear attention need form="parallel"; this call ran in form "chunked"'
            )
        dnum, dden = grads
        q, k, v, zq, zk, documents, kv, z = ctx.saved_tensors
        n, g, t, _ = q.shape
        steps, sums = [], []
        kv, z = kv.clone(), z.clone().unsqueeze(1)
        for block in blocks(documents, t, ctx.size, q.dtype):
            steps.append(block)
            sums.append((kv.clone(), z.clone()))
            kv, z = _onwards(block, kv, z, *(x[:, block.at] for x in (k, v, zk)))
        dq, dk, dv, dzq, dzk = (torch.empty_like(x) for x in (q, k, v, zq, zk))
        later, zlater = torch.zeros_like(kv), torch.zeros_like(z)
        for block, (kv, z) in zip(reversed(steps), reversed(sums), strict=True):
            at, head, tail = block.at, block.head, block.tail
            qc, gc = q[:, :, at].flatten(1, 2), dnum[:, :, at].flatten(1, 2)
            kc, vc, zc = k[:, at], v[:, at], zk[:, at]
            on_scores = block.allowed(torch.bmm(gc, vc.mT))
            scores = block.allowed(torch.bmm(qc, kc.mT))
            d_den = dden[:, :, at].unsqueeze(-1)
            weighed = (d_den * zq[:, :, at]).sum(1)
            q_past, g_past = (_only(head, x[:, :, at]).flatten(1, 2) for x in (q, dnum))
            dq[:, :, at] = torch.bmm(on_scores, kc).baddbmm_(g_past, kv.mT).view(n, g, -1, kc.shape[-1])
            dk[:, at] = torch.bmm(on_scores.mT, qc).baddbmm_(_only(tail, vc), later.mT)
            dv[:, at] = torch.bmm(scores.mT, gc).baddbmm_(_only(tail, kc), later)
            dzq[:, :, at] = d_den * (block.before(zc) + _only(head, z)).unsqueeze(1)
            dzk[:, at] = block.after(weighed) + _only(tail, zlater)
            later = _only(block.whole, later).baddbmm_(q_past.mT, gc)
            zlater = _only(block.whole, zlater) + _only(head, weighed).sum(1, keepdim=True)
        return dq, dk, dv, dzq, dzk, None, None, None, None


def _onwards(block: Block, kv: Tensor, z: Tensor, k: Tensor, v: Tensor, zk: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sums after a block, from those before it; kv is changed in place if there is one document."""
    kv = _only(block.whole, kv).baddbmm_(_only(block.tail, k).mT, v)
    return kv, _only(block.whole, z) + _only(block.tail, zk).sum(1, keepdim=True)


def _only(mask: Tensor | None, x: Tensor) -> Tensor:
    """Returns x [N, C, ...] or [N, G, C, ...] where the mask [N|1, C|1, 1] is 1, 0 elsewhere; x itself without a
    mask."""
    if mask is None:
        return x
    return x * (mask if x.dim() == 3 else mask[:, None])
