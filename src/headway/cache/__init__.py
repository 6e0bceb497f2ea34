"""KV caches in pages that are released once no later query can attend to them, and caches of fixed-size recurrent
states."""

from headway.cache.batch_cache import BatchCache
from headway.cache.choose import choose_cache, pattern_facts
from headway.cache.kept import Kept, put_kept, take_kept
from headway.cache.page_table import PAGE, PageClass, PageTable
from headway.cache.paged_cache import PagedCache, PagedLayer, PagedStates
from headway.cache.pages import PagePool
from headway.cache.spec import KV_DTYPES, CacheSpec, StateSpec, kv_dtype, state_dtype
from headway.cache.stored_text import StoredText

__all__ = [
    "KV_DTYPES",
    "PAGE",
    "BatchCache",
    "CacheSpec",
    "Kept",
    "PageClass",
    "PagePool",
    "PageTable",
    "PagedCache",
    "PagedLayer",
    "PagedStates",
    "StateSpec",
    "StoredText",
    "choose_cache",
    "kv_dtype",
    "pattern_facts",
    "put_kept",
    "state_dtype",
    "take_kept",
]
