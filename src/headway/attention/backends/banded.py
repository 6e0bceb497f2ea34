"""Backend `banded`: any pattern in blocks, in memory linear in the length, with a backward; plain torch.

Slots are first sorted so that the tokens of a block are alike (`BlockOrder`); the plan then says which blocks are
computed. (The role of "chunks" in Beltagy et al. 2020, section 3.2, for every pattern and without its factor of two in
memory.)
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from headway.attention.backends.base import Backend, Gradients
from headway.attention.call import Call
from headway.attention.plan import BlockOrder, Plan, plan
from headway.attention.tile_attention import (
    KeyBlock,
    QueryTile,
    ResultGradient,
    finite,
    tile_backward,
    tile_forward,
)
from headway.partial import Partial
from headway.patterns import Pattern, visible
from headway.patterns.program import TokensMemo
from headway.tokens import Tokens

WIDEST = 2048
"""Most keys of a block; longer entries of the plan are split."""


def tile_of(pattern: Pattern) -> int:
    """Returns the number of queries of a tile: few for narrow windows, so that less is computed in vain, many for
    wide patterns."""
    before, after = pattern.reach
    if before is None or after is None:
        return 256
    width = (before + after) // pattern.dilation
    return 64 if width <= 128 else 128 if width <= 1024 else 256


def _order(pattern: Pattern, q: Tokens, k: Tokens) -> tuple[BlockOrder, BlockOrder, Plan]:
    """Returns the queries and keys in block order, and the plan of which blocks are computed."""
    queries, keys = BlockOrder(q, pattern.dilation), BlockOrder(k, pattern.dilation)
    return queries, keys, plan(pattern, queries.tokens, keys.tokens, tile_of(pattern))


_ordered = TokensMemo(_order)


class _Blocks:
    """The tensors of a call in block order, with one plan for each key set."""

    def __init__(self, call: Call) -> None:
        ordered = [_ordered(call.pattern, call.q_tokens, part.tokens) for part in call.keys]
        self.call, self.tile, self.queries = call, tile_of(call.pattern), ordered[0][0]
        self.keys, self.plans = [keys for _, keys, _ in ordered], [block_plan for *_, block_plan in ordered]
        self.q = call.grouped(self.queries.take(call.clean_queries()))
        sides, dtype = list(zip(self.keys, call.keys, strict=True)), call.work_dtype
        self.k = [at.take(part.k).to(dtype) for at, part in sides]
        self.v = [at.take(part.v).to(dtype) for at, part in sides]
        self.finite = [finite(k) and finite(v) for k, v in zip(self.k, self.v, strict=True)]
        self.q_slots = self.queries.slots
        self.k_slots = [at.slots + first for at, first in zip(self.keys, call.slots, strict=True)]

    def tiles(self) -> Iterator[tuple[int, slice, QueryTile]]:
        """Yields (number, places, queries) for each query tile."""
        count = self.call.q.shape[2]
        for number, begin in enumerate(range(0, count, self.tile)):
            at = slice(begin, min(begin + self.tile, count))
            q = self.q[:, :, :, at].to(self.call.work_dtype)
            yield number, at, QueryTile(q, self.queries.tokens.slice(at.start, at.stop), self.q_slots[:, at])

    def blocks(self, number: int, queries: QueryTile) -> Iterator[tuple[int, slice, KeyBlock]]:
        """Yields (key set, places, block) for each entry of a query tile; long entries come in several pieces."""
        for i, order in enumerate(self.keys):
            for entry in self.plans[i].row(number):
                for begin in range(entry.begin, entry.end, WIDEST):
                    at = slice(begin, min(begin + WIDEST, entry.end))
                    tokens = order.tokens.slice(at.start, at.stop)
                    mask = None if entry.full else visible(self.call.pattern, queries.tokens, tokens)
                    k, v, slots = self.k[i][:, :, at], self.v[i][:, :, at], self.k_slots[i][:, at]
                    yield i, at, KeyBlock(k, v, tokens, slots, mask, self.finite[i])


def forward(call: Call, lse: bool = True) -> Partial:
    """Returns the partial over all key sets, computed tile by tile."""
    blocks = _Blocks(call)
    batch, heads, count, _ = call.q.shape
    out = call.q.new_zeros(batch, heads, count, call.keys[0].v.shape[-1])
    sums = torch.full((batch, heads, count, 1), float("-inf"), dtype=call.work_dtype, device=call.q.device)
    for number, at, queries in blocks.tiles():
        part = tile_forward(call, queries, [block for *_, block in blocks.blocks(number, queries)])
        out[:, :, at], sums[:, :, at, 0] = part.out.to(out.dtype), part.lse
    return Partial(blocks.queries.give_back(out), blocks.queries.give_back(sums).squeeze(-1))


def backward(call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor) -> Gradients:
    """Returns the gradients in the work dtype, computed block by block."""
    blocks, dtype = _Blocks(call), call.work_dtype
    order = blocks.queries
    out, d_out = order.take(out), order.take(d_out)
    lse, d_lse = (order.take(t.unsqueeze(-1)).squeeze(-1) for t in (lse, d_lse))
    dq = torch.zeros(blocks.q.shape, dtype=dtype, device=call.q.device)
    dk = [torch.zeros(k.shape, dtype=dtype, device=k.device) for k in blocks.k]
    dv = [torch.zeros(v.shape, dtype=dtype, device=v.device) for v in blocks.v]
    parameters = [torch.zeros_like(p) for p in call.parameters]
    for number, at, queries in blocks.tiles():
        result = ResultGradient.of(call, *(t[:, :, at] for t in (out, lse, d_out, d_lse)))
        for i, places, block in blocks.blocks(number, queries):
            gq, gk, gv, g_scores = tile_backward(call, queries, block, result)
            dq[:, :, :, at] += gq
            dk[i][:, :, places] += gk
            dv[i][:, :, places] += gv
            for total, grad in zip(parameters, g_scores, strict=True):
                if grad is not None:
                    total += grad
    k, v = ([o.give_back(g) for o, g in zip(blocks.keys, grads, strict=True)] for grads in (dk, dv))
    return Gradients(order.give_back(dq.flatten(1, 2)), k, v, parameters)


BANDED = Backend(
    name="banded",
    about="windows and other sparse patterns in linear memory, with a backward",
    forward=forward,
    backward=backward,
)
