"""An empty past of every layer of a model, in pages: for texts that come and go, or for the rows of a batch."""

import torch

from headway.cache import CacheSpec, PagedCache
from headway.errors import ConfigError
from headway.models.stack import TransformerStack
from headway.nn import AttentionLayer


def make_paged_cache(
    stack: TransformerStack,
    *,
    budget: int | None = None,
    keep: int | None = None,
    slack: int = 0,
    dtype: torch.dtype | None = None,
) -> PagedCache:
    """An empty past of every layer for texts that come and go; `dtype` is that of the weights unless given.

    Raises ConfigError for slack with linear attention, whose sums no token can be taken out of."""
    spec = stack.spec
    if spec.linear is not None and slack:
        raise ConfigError(
            f"linear attention keeps sums over all keys, so there is nothing to trim; got slack={slack}"
        )
    of_layer = cache_spec(stack, dtype)
    return PagedCache(of_layer, spec.patterns, spec.linear, budget=budget, keep=keep, slack=slack)


def cache_spec(stack: TransformerStack, dtype: torch.dtype | None = None) -> CacheSpec:
    """What a layer keeps of a token: of a model whose heads are shared by ranks, this rank's. Which tokens it keeps is
    the same on all of them (`ModelSpec.patterns`), so that they have the same pages."""
    heads = next(layer.heads for layer in stack.modules() if isinstance(layer, AttentionLayer))
    like, size = stack.like, stack.spec.head_dim
    return CacheSpec(
        kv_heads=heads.kv_heads,
        head_dim=size,
        dtype=like.dtype if dtype is None else dtype,
        device=like.device,
    )
