"""Backend `banded`: any pattern in blocks, in memory linear in the length, with a backward; plain torch.

Slots are first put in an order in which blocks are alike (global tokens together, residue classes of a
dilation together, padding last), then the plan says which blocks are computed. (The role of "chunks" in Beltagy
et al. 2020, section 3.2, for every pattern and without its factor of two in memory.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headway.attention.call import Call
from headway.attention.plan import Plan, planned
from headway.attention.tile_attention import Final, KeyBlock, Queries, backward, forward
from headway.partial import Partial
from headway.patterns import Pattern
from headway.tokens import Tokens

WIDEST = 2048


class Side:
    """One side in block order: its tokens, its original slots, and how to get there and back."""

    def __init__(self, tokens: Tokens, step: int) -> None:
        self.order = _order(tokens, step)
        self.tokens = tokens if self.order is None else tokens.gather(self.order)
        slots = torch.arange(tokens.count, device=tokens.device).unsqueeze(0)
        self.slots = slots if self.order is None else self.order

    def take(self, t: Tensor) -> Tensor:
        """[B, heads, N, D] in block order."""
        return t if self.order is None else t.gather(2, self._index(self.order, t))

    def give_back(self, t: Tensor) -> Tensor:
        """[B, heads, N, D] in the original order of slots."""
        return t if self.order is None else t.gather(2, self._index(self.order.argsort(1), t))

    @staticmethod
    def _index(order: Tensor, t: Tensor) -> Tensor:
        return order.view(order.shape[0], 1, -1, 1).expand(t.shape[0], t.shape[1], -1, t.shape[3])


def _order(tokens: Tokens, step: int) -> Tensor | None:
    """Slots sorted by (empty, not global, residue, document, index), [B|1, N]; None if they are already."""
    if tokens.start is not None and tokens.is_global is None and step == 1:
        return None
    index, document = tokens.index, tokens.documents
    if not index.numel():
        return None
    key = (~tokens.valid).long() * 2 + (~tokens.globals).long()
    key = key * step + index % step
    key = key * (int(document.max()) + 2) + document + 1
    key = key * (int(index.max()) + 2) + index + 1
    if bool((key[:, 1:] >= key[:, :-1]).all()):
        return None
    return key.argsort(dim=1, stable=True)


def finite(t: Tensor) -> bool:
    """No NaN or infinity: their sum would not be a number (an overflow of the sum only costs a copy)."""
    return not t.numel() or bool(t.sum().isfinite())


def tile_of(pattern: Pattern) -> int:
    """Queries per tile: small for narrow windows (less is computed in vain), large for wide patterns."""
    before, after = pattern.reach
    if before is None or after is None:
        return 256
    width = (before + after) // pattern.dilation
    return 64 if width <= 128 else 128 if width <= 1024 else 256


class Layout:
    """A call in block order, with its plans."""

    def __init__(self, call: Call) -> None:
        step = call.pattern.dilation
        self.call, self.queries = call, Side(call.q_tokens, step)
        self.keys = [Side(part.tokens, step) for part in call.keys]
        tile = tile_of(call.pattern)
        self.plans: list[Plan] = [
            planned(call.pattern, self.queries.tokens, s.tokens, tile) for s in self.keys
        ]
        self.tile = tile
        empty = None if call.q_tokens.start is not None else ~self.queries.tokens.valid
        q = self.queries.take(call.q)
        self.q = call.grouped(q if empty is None else q.masked_fill(empty[:, None, :, None], 0.0))
        sides, dtype = list(zip(self.keys, call.keys, strict=True)), call.work_dtype
        self.k = [side.take(part.k).to(dtype) for side, part in sides]
        self.v = [side.take(part.v).to(dtype) for side, part in sides]
        self.finite = [finite(k) and finite(v) for k, v in zip(self.k, self.v, strict=True)]

    def tiles(self) -> Iterator[tuple[int, int, Queries]]:
        for number, begin in enumerate(range(0, self.call.q.shape[2], self.tile)):
            end = min(begin + self.tile, self.call.q.shape[2])
            q = self.q[:, :, :, begin:end].to(self.call.work_dtype)
            yield (
                number,
                end,
                Queries(q, self.queries.tokens.slice(begin, end), self.queries.slots[:, begin:end]),
            )

    def blocks(self, number: int, at: Queries) -> Iterator[tuple[int, int, int, KeyBlock]]:
        """(key set, begin, end, block) of every entry of a query tile; wide entries in several pieces."""
        for which, (side, first) in enumerate(zip(self.keys, self.call.slots, strict=True)):
            for entry in self.plans[which].row(number):
                for begin in range(entry.begin, entry.end, WIDEST):
                    end = min(begin + WIDEST, entry.end)
                    tokens = side.tokens.slice(begin, end)
                    mask = None if entry.full else self.call.visible(at.tokens, tokens)
                    k, v = self.k[which][:, :, begin:end], self.v[which][:, :, begin:end]
                    slots = side.slots[:, begin:end] + first
                    yield which, begin, end, KeyBlock(k, v, tokens, slots, mask, self.finite[which])


def run_forward(call: Call) -> Partial:
    """The partial over all key sets, tile by tile."""
    layout = Layout(call)
    batch, heads, count, _ = call.q.shape
    out = call.q.new_zeros(batch, heads, count, call.keys[0].v.shape[-1])
    lse = torch.full((batch, heads, count, 1), float("-inf"), dtype=call.work_dtype, device=call.q.device)
    for number, end, at in layout.tiles():
        part = forward(call, at, [block for *_, block in layout.blocks(number, at)])
        rows = slice(end - at.q.shape[3], end)
        out[:, :, rows], lse[:, :, rows, 0] = part.out.to(out.dtype), part.lse
    return Partial(layout.queries.give_back(out), layout.queries.give_back(lse).squeeze(-1))


def run_backward(
    call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """Gradients of q, of each k, of each v and of the tensors of the scores, in the work dtype."""
    layout, dtype = Layout(call), call.work_dtype
    side = layout.queries
    out, d_out = side.take(out), side.take(d_out)
    lse, d_lse = (side.take(t.unsqueeze(-1)).squeeze(-1) for t in (lse, d_lse))
    dq = torch.zeros(layout.q.shape, dtype=dtype, device=call.q.device)
    dk = [torch.zeros(k.shape, dtype=dtype, device=k.device) for k in layout.k]
    dv = [torch.zeros(v.shape, dtype=dtype, device=v.device) for v in layout.v]
    extra = [torch.zeros_like(p) for p in call.parameters]
    for number, end, at in layout.tiles():
        rows = slice(end - at.q.shape[3], end)
        final = Final.of(call, *(t[:, :, rows] for t in (out, lse, d_out, d_lse)))
        for which, begin, stop, block in layout.blocks(number, at):
            gq, gk, gv, rest = backward(call, at, block, final)
            dq[:, :, :, rows] += gq
            dk[which][:, :, begin:stop] += gk
            dv[which][:, :, begin:stop] += gv
            for total, grad in zip(extra, rest, strict=True):
                if grad is not None:
                    total += grad
    q_grad = side.give_back(dq.flatten(1, 2))
    back = layout.keys
    k_grads = [s.give_back(g) for s, g in zip(back, dk, strict=True)]
    return q_grad, k_grads, [s.give_back(g) for s, g in zip(back, dv, strict=True)], extra
