"""Makes an empty paged KV cache for every layer of a model, for sequences that come and go or for the rows of a
batch."""

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
    """Returns an empty paged cache with the keys, values and states of every layer; `dtype` is the dtype of the
    weights if None.

    Raises ConfigError for slack if a layer keeps a recurrent state, which cannot be trimmed.
    """
    of_layers = cache_specs(stack, dtype)
    state_dtype = stack.like.dtype if dtype is None or not dtype.is_floating_point else dtype
    states = [block.self_attn.state(state_dtype) for block in stack.blocks]
    patterns, beside_numbers = stack.spec.patterns, beside_layers(stack.spec.mixers)
    for i in beside_numbers:  # their states are appended after those of all layers
        beside = stack.blocks[i].self_attn.beside
        assert isinstance(beside, MixingLayer)
        states.append(beside.state(state_dtype))
    of_layers += [of_layers[i] for i in beside_numbers]
    if slack and (names := state_kinds(stack.spec)):
        raise ConfigError(
            f"slack={slack}: layers of {names} keep one state of all tokens, which cannot be trimmed; use slack=0"
        )
    patterns = (*patterns, *(patterns[i] for i in beside_numbers))
    cache = PagedCache(of_layers, patterns, states, budget=budget, keep=keep, slack=slack)
    for number, i in enumerate(beside_numbers, stack.spec.layers):
        cache[i].beside = cache[number]
    return cache


def cache_specs(stack: TransformerStack, dtype: torch.dtype | None = None) -> list[CacheSpec | None]:
    """Returns what the cache of each layer stores, None for a layer that uses another layer's keys; under tensor
    parallelism for this rank's heads. Which tokens are kept does not depend on the rank (`ModelSpec.patterns`), so
    all ranks have the same pages."""
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
