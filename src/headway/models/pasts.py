"""An empty past of every layer of a model, in pages: for texts that come and go, or for the rows of a batch."""

import torch

from headway.cache import CacheSpec, PagedCache
from headway.errors import ConfigError
from headway.models.mixers import beside_layers, state_kinds
from headway.models.stack import TransformerStack
from headway.nn import AttentionLayer, MixingLayer


def make_paged_cache(
    stack: TransformerStack,
    *,
    budget: int | None = None,
    keep: int | None = None,
    slack: int = 0,
    dtype: torch.dtype | None = None,
) -> PagedCache:
    """An empty past of every layer for texts that come and go; `dtype` is that of the weights unless given.

    Raises ConfigError for slack where a layer keeps a state of all tokens, which cannot be trimmed."""
    of_layers = cache_specs(stack, dtype)
    state_dtype = stack.like.dtype if dtype is None or not dtype.is_floating_point else dtype
    states = [block.self_attn.state(state_dtype) for block in stack.blocks]
    patterns, beside_numbers = stack.spec.patterns, beside_layers(stack.spec.mixers)
    for i in beside_numbers:  # behind those of all layers
        beside = stack.blocks[i].self_attn.beside
        assert isinstance(beside, MixingLayer)
        states.append(beside.state(state_dtype))
    of_layers += [of_layers[i] for i in beside_numbers]
    if slack and (names := state_kinds(stack.spec)):
        raise ConfigError(
            f"layers of {names} keep a state of all tokens, so there is nothing to trim; got slack={slack}"
        )
    patterns = (*patterns, *(patterns[i] for i in beside_numbers))
    cache = PagedCache(of_layers, patterns, states, budget=budget, keep=keep, slack=slack)
    for number, i in enumerate(beside_numbers, stack.spec.layers):
        cache[i].beside = cache[number]
    return cache


def cache_specs(stack: TransformerStack, dtype: torch.dtype | None = None) -> list[CacheSpec | None]:
    """Returns what the cache of each layer holds, None where a layer uses another layer's keys; where ranks share
    heads, for this rank's heads. Which tokens it keeps is the same on all of them (`ModelSpec.patterns`), so that they
    have the same pages."""
    like, spec = stack.like, stack.spec
    layers = (block.self_attn for block in stack.blocks)
    return [
        None
        if isinstance(layer, AttentionLayer) and layer.kv_from is not None
        else CacheSpec(
            kv_heads=layer.heads.kv_heads if isinstance(layer, AttentionLayer) else kv_heads,
            head_dim=head_dim,
            dtype=like.dtype if dtype is None else dtype,
            device=like.device,
        )
        for layer, (kv_heads, head_dim) in zip(layers, spec.key_sizes, strict=True)
    ]
