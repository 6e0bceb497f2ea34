"""Backend `diagonal`: one product for each diagonal, storing only nonzero weights. Small, slow, for comparison.

(The "loop" implementation of Beltagy et al. 2020, section 3.2.) Pinned keys (sinks, global tokens) are columns and
global queries are rows, both computed as blocks; the three sets of pairs are disjoint and are merged.

Legend: B rows, K kv heads, G group, T slots, D per head, Dv of v.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from headway.attention.backends.base import Backend, Capabilities, Gradients
from headway.attention.call import Call
from headway.attention.tile_attention import KeyBlock, QueryTile, ResultGradient, tile_backward, tile_forward
from headway.partial import Partial, merge_all
from headway.patterns import visible
from headway.patterns.primitives import Kind
from headway.patterns.program import kinds, sinks, without
from headway.tokens import Tokens

PINNED = (Kind.SINK, Kind.GLOBAL_KEYS, Kind.GLOBAL_QUERIES)
"""Primitives whose pairs are whole columns or rows."""


def limits(call: Call, device: str) -> str | None:
    """Returns why the diagonals of this call's slots are not those of its pattern's indices, or None if they are."""
    if len(call.keys) > 1:
        return "it takes one set of keys"
    q, k = call.q_tokens, call.keys[0].tokens
    sides = ((q.index, k.index), (q.documents, k.documents))
    if q.count != k.count or not all(bool((a == b).all()) for a, b in sides):
        return "queries and keys must be the same slots"
    return None if _diagonal(q) else "the tokens of a document must be contiguous, in order and unique"


def _diagonal(tokens: Tokens) -> bool:
    """Returns whether any two tokens of a document are as many slots apart as their indices are, so that index -
    slot is constant."""
    if tokens.static_key is not None or tokens.count < 2:
        return True
    shift = tokens.index - torch.arange(tokens.count, device=tokens.device)
    empty = torch.iinfo(torch.int64).min
    document, order = torch.where(tokens.valid, tokens.documents, empty).sort(dim=1, stable=True)
    shift = shift.expand(order.shape).gather(1, order)
    same = (document[:, 1:] == document[:, :-1]) & (document[:, 1:] != empty)
    return not bool((same & (shift[:, 1:] != shift[:, :-1])).any())


class _Parts:
    """The pairs of a call in three sets: diagonals, columns of pinned keys, and rows of global queries."""

    def __init__(self, call: Call) -> None:
        (part,) = call.keys
        self.call, self.tokens, dtype = call, part.tokens, call.work_dtype
        batch, count = call.q.shape[0], call.q.shape[2]
        q_tokens, present = call.q_tokens, kinds(call.pattern)
        self.rows = (q_tokens.globals & q_tokens.valid & (Kind.GLOBAL_QUERIES in present)).expand(batch, -1)
        pinned = self.tokens.globals & (Kind.GLOBAL_KEYS in present)
        pinned = pinned | (self.tokens.index < sinks(call.pattern))
        self.columns = (pinned & self.tokens.valid).expand(batch, -1)
        empty = ~self.tokens.valid[:, None, :, None]
        self.q = call.grouped(call.clean_queries().to(dtype))
        self.k, self.v = (t.to(dtype).masked_fill(empty, 0.0) for t in (part.k, part.v))
        before, after = without(call.pattern, *PINNED).reach
        first, last = (count - 1 if side is None else min(side, count - 1) for side in (before, after))
        masks = {d: self._mask(d) for d in range(-first, last + 1)} if count else {}
        self.band = {d: mask for d, mask in masks.items() if bool(mask.any())}

    def span(self, d: int) -> tuple[slice, slice]:
        """Returns the query slots and the key slots of diagonal d, where k = q + d."""
        count = self.call.q.shape[2]
        low, high = max(0, -d), min(count, count - d)
        return slice(low, high), slice(low + d, high + d)

    def _mask(self, d: int) -> Tensor:
        """Returns which pairs of diagonal d are visible and in no column or row, bool [B, 1, 1, n]."""
        at_q, at_k = self.span(d)
        rows = self.call.q.shape[0]
        q = self.call.q_tokens.expand(rows).slice(at_q.start, at_q.stop)
        k = self.tokens.expand(rows).slice(at_k.start, at_k.stop)
        pairs = visible(self.call.pattern, _single(q), _single(k)).view(rows, at_q.stop - at_q.start)
        return (pairs & ~self.rows[:, at_q] & ~self.columns[:, at_k])[:, None, None]

    def products(self, d: int) -> Tensor:
        """Returns the scaled scores [B, K, G, n] of diagonal d."""
        at_q, at_k = self.span(d)
        s = (self.q[:, :, :, at_q] * self.k[:, :, None, at_k]).sum(-1) * self.call.scale
        return s.masked_fill(~self.band[d], float("-inf"))

    def blocks(self) -> Iterator[tuple[QueryTile, KeyBlock]]:
        """Yields the columns with all queries, then the rows with all other keys; both span all slots and are
        masked."""
        q_tokens = self.call.q_tokens
        if not bool(self.columns.any() | self.rows.any()):
            return
        slots = torch.arange(q_tokens.count, device=q_tokens.device).unsqueeze(0)
        seen = visible(self.call.pattern, q_tokens, self.tokens)
        column, row = self.columns[:, None, None, :], self.rows[:, None, :, None]
        for mask in (seen & column, seen & row & ~column):
            if bool(mask.any()):
                at = QueryTile(self.q, q_tokens, slots)
                yield at, KeyBlock(self.k, self.v, self.tokens, slots, mask, finite=False)


def _single(tokens: Tokens) -> Tokens:
    """Makes each slot a row of its own: [B, n] -> [B * n, 1]."""
    return tokens.map(lambda t: t.reshape(-1, 1))


def forward(call: Call, lse: bool = True) -> Partial:
    """Returns the merged partial of band, columns and rows."""
    parts = _Parts(call)
    batch, kv, group, count, _ = parts.q.shape
    scores = parts.q.new_full((batch, kv, group, count, max(len(parts.band), 1)), float("-inf"))
    for column, d in enumerate(parts.band):
        scores[:, :, :, parts.span(d)[0], column] = parts.products(d)
    sums = torch.logsumexp(scores, -1)
    weight = torch.exp(scores - sums.masked_fill(sums == float("-inf"), 0.0).unsqueeze(-1))
    out = parts.q.new_zeros(batch, kv, group, count, parts.v.shape[-1])
    for column, d in enumerate(parts.band):
        at_q, at_k = parts.span(d)
        out[:, :, :, at_q] += weight[:, :, :, at_q, column, None] * parts.v[:, :, None, at_k]
    near = Partial(out.flatten(1, 2), sums.flatten(1, 2))
    merged = merge_all([near, *(tile_forward(call, at, [keys]) for at, keys in parts.blocks())])
    return Partial(merged.out.to(call.q.dtype), merged.lse)


def backward(call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor) -> Gradients:
    """Returns the gradients of q, k and v in the work dtype, summed over the three sets of pairs."""
    parts = _Parts(call)
    result = ResultGradient.of(call, out, lse, d_out, d_lse)
    group = parts.q.shape[2]
    rows = result.d_out.unflatten(2, (group, -1))
    lse5, delta5 = call.grouped(result.lse), call.grouped(result.delta)
    dq, dk, dv = (torch.zeros_like(t) for t in (parts.q, parts.k, parts.v))
    for d in parts.band:
        at_q, at_k = parts.span(d)
        p = torch.exp(parts.products(d) - lse5[..., at_q])
        dp = (rows[:, :, :, at_q] * parts.v[:, :, None, at_k]).sum(-1)
        ds = p * (dp - delta5[..., at_q]) * call.scale
        dq[:, :, :, at_q] += ds.unsqueeze(-1) * parts.k[:, :, None, at_k]
        dk[:, :, at_k] += (ds.unsqueeze(-1) * parts.q[:, :, :, at_q]).sum(2)
        dv[:, :, at_k] += (p.unsqueeze(-1) * rows[:, :, :, at_q]).sum(2)
    for at, keys in parts.blocks():
        gq, gk, gv, _ = tile_backward(call, at, keys, result)
        dq, dk, dv = dq + gq, dk + gk, dv + gv
    return Gradients(dq.flatten(1, 2), [dk], [dv], [])


DIAGONAL = Backend(
    name="diagonal",
    about="one product per diagonal; small and slow, for comparison",
    forward=forward,
    backward=backward,
    capabilities=Capabilities(dropout=False, scores=False, any_queries=False),
    limits=limits,
)
