"""A single layer with a cache of its own."""

from __future__ import annotations

from torch import Tensor

from headway.attention import attend_keys
from headway.cache import BatchCache, CacheSpec, PagedCache, PagedLayer
from headway.nn import AttentionLayer
from headway.patterns import Pattern
from headway.scores import Score
from headway.tokens import Tokens


def cache_of(layer: AttentionLayer, batch: int, **more: int) -> BatchCache:
    """Returns an empty cache of `batch` rows of what the layer keeps."""
    dtype = layer.k_proj.matrix.dtype
    spec = CacheSpec(
        kv_heads=layer.heads.kv_heads, head_dim=layer.head_dim, value_dim=layer.value_dim, dtype=dtype
    )
    return BatchCache(PagedCache(spec, [layer.pattern], [layer.state(dtype)], **more), batch)


def continued(layer: AttentionLayer, x: Tensor, cache: BatchCache, tokens: Tokens | None = None) -> Tensor:
    """Stores the rows' next tokens, x [B, T, M], and returns what they see of all stored ones: [B, T, M], 0 in empty
    slots."""
    with cache.step(cache.next_tokens(x.shape[1]) if tokens is None else tokens) as packed:
        y = layer(packed.take(x), tokens=packed.tokens, cache=cache.pages[0])
    return packed.put(y, *x.shape[:2])


def attended(
    cache: BatchCache,
    tokens: Tokens,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    backend: str = "auto",
    score: tuple[Score, ...] = (),
) -> Tensor:
    """Stores the rows' next keys and values, [B, heads, T, D], in the one layer of a cache, and returns what their
    queries see of all stored ones: [B, H, T, E], 0 in empty slots."""
    with cache.step(tokens) as packed:
        q, k, v = (packed.take(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v))
        layer = cache.pages[0]
        assert isinstance(layer, PagedLayer)
        keys = layer.update(k, v, packed.tokens)
        out = attend_keys(q, packed.tokens, [keys], pattern, score=score, backend=backend).out
    rows = packed.put(out.transpose(1, 2).flatten(2), cache.batch, tokens.count)
    return rows.unflatten(2, out.shape[1::2]).transpose(1, 2)
