"""An empty past of every layer of a model, in pages: for texts that come and go, or for the rows of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.cache import CacheSpec, PagedCache
from headway.errors import ConfigError
from headway.models.spec import ModelSpec


def make_paged_cache(
    spec: ModelSpec,
    like: Tensor,
    *,
    budget: int | None = None,
    keep: int | None = None,
    slack: int = 0,
    dtype: torch.dtype | None = None,
) -> PagedCache:
    """An empty past of every layer for texts that come and go; `dtype` is that of the weight `like` unless given.

    Raises ConfigError for slack with linear attention, whose sums no token can be taken out of."""
    if spec.linear is not None and slack:
        raise ConfigError(
            f"linear attention keeps sums over all keys, so there is nothing to trim; got slack={slack}"
        )
    of_layer = CacheSpec(
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        dtype=like.dtype if dtype is None else dtype,
        device=like.device,
    )
    return PagedCache(of_layer, spec.patterns, spec.linear, budget=budget, keep=keep, slack=slack)
