"""Windows in plain torch, at their best: overlapping chunks through torch's own fused attention.

A chunk of C queries sees the C + before + after keys around it, so all chunks inside a row share one mask and are
one call; those at the ends of the row see fewer keys and are calls of their own. Heads stand in the batch's place
and chunks in the heads', so the overlapping keys are a strided view and nothing is copied for them. (Beltagy et al.
2020, section 3.2, "chunks", with a fused kernel in the place of two products.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.attention.call import split
from headway.patterns import Window, visible
from headway.tokens import Tokens


def chunked(q: Tensor, k: Tensor, v: Tensor, window: Window, size: int, joined: bool) -> Callable[[], Tensor]:
    """Attention under `window` in chunks of `size` queries, as a call. q [B, H, N, D]; k, v [B, K, N, D].

    `joined` makes the overlapping keys by joining slices, whose backward adds slices; otherwise they are a
    view, whose backward scatters."""
    rows, heads, count, _ = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    before, after = window.before, window.after
    first, last = -(-before // size), max(-(-before // size), (count - after) // size)
    inside = last - first

    def mask(begin: int, end: int, low: int, high: int) -> Tensor:
        seen = visible(window, Tokens.range(end - begin, begin), Tokens.range(high - low, low))[0, 0]
        bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, float("-inf"))
        return bias.repeat(group, 1)

    # (first query, its end, first key, its end) of each piece at the ends of the row
    cuts = [*range(0, first * size, size), *range(last * size, count, size)]
    ends = [(at, min(at + size, count)) for at in cuts if at < count]
    ends = list(dict.fromkeys(ends))
    places = [(a, b, max(0, a - before), min(count, b + after)) for a, b in ends]
    masks = [mask(*place) for place in places]
    shared = mask(before, before + size, 0, size + before + after) if inside else None

    def stacked(t: Tensor, chunks: int) -> Tensor:
        """[B, H, chunks * C, D] as [B K, chunks, G C, D]."""
        parts = split(split(t, 1, kv_heads, group), 3, chunks, t.shape[2] // chunks)
        return parts.transpose(2, 3).flatten(3, 4).flatten(0, 1)

    def unstacked(t: Tensor) -> Tensor:
        """The way back."""
        parts = split(split(t, 2, group, -1), 0, rows, kv_heads)
        return parts.transpose(2, 3).flatten(1, 2).flatten(2, 3)

    def overlapping(t: Tensor) -> Tensor:
        """[B, K, N, D] as [B K, chunks, C + before + after, D]."""
        t = t.narrow(2, first * size - before, inside * size + before + after).flatten(0, 1)
        span = size + before + after
        if not joined:
            return t.unfold(1, span, size).transpose(2, 3)
        pieces = []
        for at in range(0, span, size):
            wide = min(size, span - at)
            begun = t[:, at : at + (inside - 1) * size + wide]
            full = F.pad(begun, (0, 0, 0, size - wide)) if wide < size else begun
            pieces.append(split(full, 1, inside, size)[:, :, :wide])
        return torch.cat(pieces, 2)

    def call() -> Tensor:
        outs = {}
        for (begin, end, low, high), bias in zip(places, masks, strict=True):
            some_k, some_v = (t[:, :, low:high].flatten(0, 1).unsqueeze(1) for t in (k, v))
            outs[begin] = unstacked(_attention(stacked(q[:, :, begin:end], 1), some_k, some_v, bias))
        if shared is not None:
            within = stacked(q[:, :, first * size : last * size], inside)
            outs[first * size] = unstacked(_attention(within, overlapping(k), overlapping(v), shared))
        return torch.cat([outs[at] for at in sorted(outs)], 2)

    return call


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def forms(q: Tensor, k: Tensor, v: Tensor, window: Window) -> Sequence[Callable[[], Tensor]]:
    """The formulations worth trying: three sizes of chunk, keys as a view or joined."""
    reach = max(64, window.before + 1, window.after + 1)
    sizes = sorted({min(size, q.shape[2]) for size in (reach // 2, reach, 2 * reach)})
    return [chunked(q, k, v, window, size, joined) for size in sizes for joined in (False, True)]
