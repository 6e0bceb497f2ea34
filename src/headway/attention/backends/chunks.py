"""Backend `chunks`: a window as overlapping chunks, with one product for all of them, in about twice the memory of the
visible pairs. For comparison.

(The "chunks" implementation of Beltagy et al. 2020, section 3.2.) A chunk of C = before + after queries reads the C +
before + after = 2 C keys around it, of which each query sees C + 1. Chunks become rows of the batch; the keys and
values that neighbouring chunks share are copied.

Legend: B rows, K kv heads, G group, T slots, D per head, n chunks, C queries and S = C + before + after keys of a
chunk.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from headway.attention.backends import diagonal
from headway.attention.backends.base import Backend, Capabilities, Gradients, first_failed
from headway.attention.call import Call
from headway.attention.tile_attention import (
    KeyBlock,
    QueryTile,
    ResultGradient,
    finite,
    tile_backward,
    tile_forward,
)
from headway.partial import Partial
from headway.patterns import visible
from headway.patterns.program import kinds
from headway.tokens import Tokens


def limits(call: Call, device: str) -> str | None:
    """Returns why this call is not a window over slots with two ends, or None if it is."""
    return first_failed(
        ({*diagonal.PINNED} & {*kinds(call.pattern)}, "it takes windows without sinks or global tokens"),
        (None in call.pattern.reach, f"it takes windows bounded on both sides, not {call.pattern}"),
    ) or diagonal.limits(call, device)


class _Chunks:
    """The tensors and tokens of a call, arranged in chunks."""

    def __init__(self, call: Call) -> None:
        (part,) = call.keys
        self.call, self.count, dtype = call, call.q.shape[2], call.work_dtype
        self.before, self.after = (min(n or 0, max(self.count - 1, 0)) for n in call.pattern.reach)
        self.size = max(1, min(self.before + self.after, self.count))
        self.chunks = max(1, -(-self.count // self.size))
        self.span = self.before + self.size + self.after
        self.missing = self.chunks * self.size - self.count
        batch = call.q.shape[0]
        q_tokens, k_tokens = (t.expand(batch) for t in (call.q_tokens, part.tokens))
        inside, around = self._tokens(q_tokens, self.apart), self._tokens(k_tokens, self.overlapping)
        empty = ~k_tokens.valid[:, None, :, None]
        k, v = (self.overlapping(t.to(dtype).masked_fill(empty, 0.0)) for t in (part.k, part.v))
        # Tiles need slots for dropout only, which this backend does not support.
        slots = torch.zeros(1, 1, dtype=torch.int64, device=call.q.device)
        self.queries = QueryTile(call.grouped(self.apart(call.clean_queries()).to(dtype)), inside, slots)
        seen = visible(call.pattern, inside, around)
        self.keys = KeyBlock(k, v, around, slots, seen, finite(k) and finite(v))

    def apart(self, t: Tensor, fill: float = 0.0) -> Tensor:
        """Splits slots into chunks: [B, H, T, ...] -> [B n, H, C, ...]."""
        t = self._padded(t, 0, self.missing, fill).unflatten(2, (self.chunks, self.size))
        return t.movedim(2, 1).flatten(0, 1)

    def overlapping(self, t: Tensor, fill: float = 0.0) -> Tensor:
        """Copies the slots around each chunk: [B, H, T, ...] -> [B n, H, S, ...]."""
        t = self._padded(t, self.before, self.missing + self.after, fill).unfold(2, self.span, self.size)
        return t.movedim(2, 1).movedim(-1, 3).flatten(0, 1)

    def joined(self, t: Tensor) -> Tensor:
        """Joins the chunks again, [B n, H, C, ...] -> [B, H, T, ...]; the inverse of `apart`."""
        t = t.unflatten(0, (-1, self.chunks)).movedim(1, 2).flatten(2, 3)
        return t[:, :, : self.count]

    def added(self, t: Tensor) -> Tensor:
        """Sums the values of a slot over the chunks that read it: [B n, K, S, D] -> [B, K, T, D]."""
        t = t.unflatten(0, (-1, self.chunks)).movedim(1, 2)
        total = t.new_zeros(*t.shape[:2], self.count + self.before + self.missing + self.after, t.shape[-1])
        for chunk in range(self.chunks):
            total[:, :, chunk * self.size : chunk * self.size + self.span] += t[:, :, chunk]
        return total[:, :, self.before : self.before + self.count]

    @staticmethod
    def _padded(t: Tensor, left: int, right: int, fill: float) -> Tensor:
        """Adds `left` slots in front of those of [B, H, T, ...] and `right` slots behind them."""
        return pad(t, [*[0, 0] * (t.dim() - 3), left, right], value=fill)

    @staticmethod
    def _tokens(tokens: Tokens, arranged: Callable[[Tensor, float], Tensor]) -> Tokens:
        """Returns the tokens with index and document rearranged by `arranged`; padded slots are empty."""
        index, document = (arranged(t.unsqueeze(1), -1).squeeze(1) for t in (tokens.index, tokens.documents))
        return Tokens(index, document)


def forward(call: Call, lse: bool = True) -> Partial:
    """Returns the partial, computed for all chunks at once."""
    chunks = _Chunks(call)
    part = tile_forward(call, chunks.queries, [chunks.keys])
    return Partial(chunks.joined(part.out).to(call.q.dtype), chunks.joined(part.lse))


def backward(call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor) -> Gradients:
    """Returns the gradients in the work dtype; those of keys and values are summed over the chunks that read them."""
    chunks = _Chunks(call)
    result = ResultGradient.of(call, *(chunks.apart(t) for t in (out, lse, d_out, d_lse)))
    dq, dk, dv, _ = tile_backward(call, chunks.queries, chunks.keys, result)
    return Gradients(chunks.joined(dq.flatten(1, 2)), [chunks.added(dk)], [chunks.added(dv)], [])


CHUNKS = Backend(
    name="chunks",
    about="windows as overlapping chunks, one product for all; for comparison",
    forward=forward,
    backward=backward,
    capabilities=Capabilities(dropout=False, scores=False, any_queries=False),
    limits=limits,
)
