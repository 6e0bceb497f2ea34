"""Takes the prefix pages that a cache keeps out of it, and puts them into another cache of the same model.

Keys are hashes of the tokens under a root (`headway.cache.page_table`), so that a page is found by what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from headway.cache.paged_cache import PagedCache
from headway.errors import CacheError


class Kept(NamedTuple):
    """The keys of each class's pages, the least recently used first, and each layer's tensors of these pages."""

    keys: Sequence[Sequence[bytes]]
    tensors: Sequence[Sequence[Tensor]]


def take_kept(cache: PagedCache) -> Kept:
    """The pages that a cache keeps, in its own tensors, which steps change. Raises CacheError while one is in use."""
    cache.compact()
    keys = [[pages.key[page] for page in pages.idle] for pages in cache.pool.stored]
    return Kept(keys, [layer.tensors for layer in cache.layers])


def put_kept(cache: PagedCache, kept: Kept) -> None:
    """Puts `kept` into an empty cache. Raises CacheError for one that holds pages, and for other layers' tensors."""
    pool, counts = cache.pool, [len(keys) for keys in kept.keys]
    if pool.held:
        raise CacheError(
            f"{pool.held} bytes of pages are held already; what was kept goes into an empty cache"
        )
    expected = [_forms(layer.empty(counts[layer.of])) for layer in cache.layers if layer.of < len(counts)]
    if len(counts) != len(pool.classes) or expected != [_forms(tensors) for tensors in kept.tensors]:
        raise CacheError("pages that were kept are of other layers than this model's; start without them")
    cache.put([[t.to(cache.device) for t in tensors] for tensors in kept.tensors], counts)
    for pages, keys in zip(pool.stored, kept.keys, strict=True):
        pages.adopt(keys)


def _forms(tensors: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(t.shape, t.dtype) for t in tensors]
