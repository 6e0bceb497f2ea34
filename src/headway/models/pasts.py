"""An empty past of every layer of a model, in pages: for texts that come and go, or for the rows of a batch."""

import torch

from headway.cache import CacheSpec, PagedCache
from headway.errors import ConfigError
from headway.models.mixers import state_kinds
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

    Raises ConfigError for slack where a layer keeps a state of all tokens, out of which none can be taken."""
    of_layer = cache_spec(stack, dtype)
    kept = of_layer.dtype if of_layer.dtype.is_floating_point else stack.like.dtype
    states = [block.self_attn.state(kept) for block in stack.blocks]
    if slack and (names := state_kinds(stack.spec)):
        raise ConfigError(
            f"layers of {names} keep a state of all tokens, so there is nothing to trim; got slack={slack}"
        )
    return PagedCache(of_layer, stack.spec.patterns, states, budget=budget, keep=keep, slack=slack)


def cache_spec(stack: TransformerStack, dtype: torch.dtype | None = None) -> CacheSpec:
    """What a layer keeps of a token: of a model whose heads are shared by ranks, this rank's. Which tokens it keeps is
    the same on all of them (`ModelSpec.patterns`), so that they have the same pages."""
    layers = (layer.heads for layer in stack.modules() if isinstance(layer, AttentionLayer))
    heads = next(layers, stack.spec.layout)
    like, size = stack.like, stack.spec.head_dim
    return CacheSpec(
        kv_heads=heads.kv_heads,
        head_dim=size,
        dtype=like.dtype if dtype is None else dtype,
        device=like.device,
    )
