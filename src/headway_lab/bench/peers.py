"""The peers of headway's attention, each built from the same inputs and none of them favoured or hindered.

What can be prepared (masks in the dtype that the kernel wants, block masks, compilation) is excluded from the time.
If torch offers several formulations, the fastest on this machine is taken.

Legend: B batch, H query heads, K KV heads, G query heads per KV head, N tokens, D per head, C queries of a chunk.
"""

import logging
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from headway.patterns import Causal, Pattern, visible
from headway.patterns.primitives import Kind
from headway.patterns.program import interval
from headway.tokens import Tokens
from headway_lab.bench.inputs import Call, Inputs, UnsupportedCase, fastest

MASK_TOKENS = 8192
"""Largest number of tokens for a dense mask, which takes 256 MiB of float32 at this size."""


def sdpa(at: Inputs) -> Call:
    """Returns torch's fused kernel with `is_causal`."""
    if at.case.pattern != Causal() or not at.plain:
        raise UnsupportedCase("it supports only causal attention without a mask")
    return lambda: F.scaled_dot_product_attention(at.q, at.k, at.v, is_causal=True, enable_gqa=at.grouped)


def mask(at: Inputs) -> Call:
    """Returns torch's fused kernel with a dense mask, additive and in the inputs' dtype, as the kernel wants it."""
    if at.case.tokens > MASK_TOKENS:
        raise UnsupportedCase(
            f"a mask of {at.case.tokens} x {at.case.tokens} is not built (up to {MASK_TOKENS})"
        )
    if not at.plain and at.case.layout != "global":
        raise UnsupportedCase("its result is undefined for rows that see nothing")
    bias = additive(visible(at.case.pattern, at.tokens, at.tokens), at.q.dtype)
    return lambda: F.scaled_dot_product_attention(at.q, at.k, at.v, attn_mask=bias, enable_gqa=at.grouped)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask as a bias: 0 where `seen`, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))


def chunks(at: Inputs) -> Call:
    """Returns overlapping chunks through the fused kernel: the fastest of three chunk sizes, with keys as a view or
    concatenated."""
    window, bounds = at.case.pattern, interval(at.case.pattern)
    if bounds is None or None in bounds or not at.plain:
        raise UnsupportedCase("chunks are for plain windows")
    reach = max(64, *(n + 1 for n in bounds if n is not None))
    sizes = sorted({min(size, at.case.tokens) for size in (reach // 2, reach, 2 * reach)})
    calls = [chunked(at.q, at.k, at.v, window, size, joined) for size in sizes for joined in (False, True)]
    return fastest(calls, at.run)


def chunked(q: Tensor, k: Tensor, v: Tensor, window: Pattern, size: int, joined: bool) -> Call:
    """Returns a call that computes attention under `window` in chunks of `size` queries. q [B, H, N, D]; k, v [B, K, N,
    D].

    A chunk of C queries sees the C + before + after keys around it, so all chunks inside a row share one mask and are
    one call; those at the ends of the row see fewer keys and are calls of their own. Heads take the place of the batch
    and chunks that of the heads, so the overlapping keys are a strided view and nothing is copied for them. (Beltagy
    et al. 2020, section 3.2, "chunks", with a fused kernel instead of two products.)

    `joined` builds the overlapping keys by concatenating slices, whose backward adds slices; otherwise they are a
    view, whose backward scatters.

    Example: C = 4, before = 2, after = 0, 12 tokens. Queries 0..3 are a call of their own; the chunks of queries 4..7
    and 8..11 see keys 2..7 and 6..11, slices of 6 keys, 4 apart."""
    rows, heads, count, _ = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    before, after = (n or 0 for n in window.reach)
    first, last = -(-before // size), max(-(-before // size), (count - after) // size)
    inside = last - first

    def bias(begin: int, end: int, low: int, high: int) -> Tensor:
        seen = visible(window, Tokens.range(end - begin, begin), Tokens.range(high - low, low))[0, 0]
        return additive(seen, q.dtype).repeat(group, 1)

    # (first query, end of queries, first key, end of keys) of each piece at the ends of the row
    cuts = dict.fromkeys((*range(0, first * size, size), *range(last * size, count, size)))
    ends = [(at, min(at + size, count)) for at in cuts if at < count]
    pieces_at_ends = [(a, b, max(0, a - before), min(count, b + after)) for a, b in ends]
    masks = {place: bias(*place) for place in pieces_at_ends}
    span = size + before + after
    shared = bias(before, before + size, 0, span) if inside else None

    def stacked(t: Tensor, chunks: int) -> Tensor:
        """Reorders [B, H, chunks * C, D] to [B K, chunks, G C, D]."""
        parts = t.reshape(rows * kv_heads, group, chunks, -1, t.shape[-1])
        return parts.transpose(1, 2).flatten(2, 3)

    def unstacked(t: Tensor) -> Tensor:
        """Reorders [B K, chunks, G C, D] to [B, H, chunks * C, D]."""
        parts = t.view(rows * kv_heads, t.shape[1], group, -1, t.shape[-1])
        return parts.transpose(1, 2).reshape(rows, heads, -1, t.shape[-1])

    def overlapping(t: Tensor) -> Tensor:
        """Returns the overlapping keys of [B, K, N, D] as [B K, chunks, C + before + after, D]."""
        t = t.narrow(2, first * size - before, inside * size + before + after).flatten(0, 1)
        if not joined:
            return t.unfold(1, span, size).transpose(2, 3)
        pieces = []
        for at in range(0, span, size):
            length = min(size, span - at)
            keys_at = t[:, at : at + (inside - 1) * size + length]
            full = F.pad(keys_at, (0, 0, 0, size - length)) if length < size else keys_at
            pieces.append(full.unflatten(1, (inside, size))[:, :, :length])
        return torch.cat(pieces, 2)

    def call() -> Tensor:
        outs = {}
        for (begin, end, low, high), mask in masks.items():
            piece_k, piece_v = (t[:, :, low:high].flatten(0, 1).unsqueeze(1) for t in (k, v))
            queries = stacked(q[:, :, begin:end], 1)
            outs[begin] = unstacked(F.scaled_dot_product_attention(queries, piece_k, piece_v, attn_mask=mask))
        if shared is not None:
            queries = stacked(q[:, :, first * size : last * size], inside)
            out = F.scaled_dot_product_attention(queries, overlapping(k), overlapping(v), attn_mask=shared)
            outs[first * size] = unstacked(out)
        return torch.cat([outs[at] for at in sorted(outs)], 2)

    return call


def flex(at: Inputs) -> Call:
    """Returns compiled FlexAttention; the time excludes its block mask and its compilation."""
    p, n = at.case.pattern.primitive, at.case.tokens
    if p is None or p.kind != Kind.WINDOW or not at.plain:
        raise UnsupportedCase("written for plain windows only")
    if at.backward:
        raise UnsupportedCase("it has no backward on a CPU")
    first, last, step = p.first, p.last, p.step

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        in_window = (k - q >= first) & (k - q <= last)
        return in_window & ((k - q) % step == 0) if step > 1 else in_window

    torch._dynamo.reset()
    logging.getLogger("torch._inductor").setLevel(logging.ERROR)
    blocks = create_block_mask(seen, None, None, n, n, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> Tensor:
        out = compiled(at.q, at.k, at.v, block_mask=blocks, enable_gqa=at.grouped)
        assert isinstance(out, Tensor)
        return out

    try:
        with torch.no_grad():
            call()
    except Exception as error:  # a compiler may raise anything
        raise UnsupportedCase(f"it does not compile here: {str(error).splitlines()[0]}") from error
    return call


PEERS: Mapping[str, Callable[[Inputs], Call]] = {"sdpa": sdpa, "mask": mask, "chunks": chunks, "flex": flex}
"""The peers by their names in the table of cases; each returns its call for the inputs of an attention case, or raises
UnsupportedCase. `attention.decode` builds the peers of decode cases. docs/benchmarks.md describes each."""
