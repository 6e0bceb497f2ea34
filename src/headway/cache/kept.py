"""Moves the prefix pages that a cache keeps into another cache of the same model.

Keys of pages are hashes of their tokens under a root (`headway.cache.page_table`), so that a page is found by its
content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from headway.cache.paged_cache import PagedCache
from headway.errors import CacheError


class Kept(NamedTuple):
    """The keys of each class's pages, least recently used first, and each layer's tensors of these pages."""

    keys: Sequence[Sequence[bytes]]
    tensors: Sequence[Sequence[Tensor]]


def take_kept(cache: PagedCache) -> Kept:
    """Returns the pages that a cache keeps as prefixes. Their tensors are the cache's own, which later steps change.

    Raises CacheError while a page is in use."""
    cache.compact()
    keys = [[pages.key[page] for page in pages.idle] for pages in cache.pool.stored]
    return Kept(keys, [layer.tensors for layer in cache.layers])


def put_kept(cache: PagedCache, kept: Kept) -> None:
    """Puts `kept` into an empty cache. Raises CacheError if the cache holds pages, or if the tensors fit other
    layers."""
    pool, counts = cache.pool, [len(keys) for keys in kept.keys]
    if pool.held:
        raise CacheError(f"put_kept: the cache must be empty, but holds {pool.held} bytes of pages")
    expected = [_forms(layer.empty(counts[layer.of])) for layer in cache.layers if layer.of < len(counts)]
    if len(counts) != len(pool.classes) or expected != [_forms(tensors) for tensors in kept.tensors]:
        raise CacheError("put_kept: the kept pages do not fit this model's layers; start without them")
    cache.put([[t.to(cache.device) for t in tensors] for tensors in kept.tensors], counts)
    for class_pages, keys in zip(pool.stored, kept.keys, strict=True):
        class_pages.adopt(keys)


def _forms(tensors: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(t.shape, t.dtype) for t in tensors]
