"""Where past keys and values live: growing or ring, chosen from what later queries see; or the sums of them."""

from headway.cache.choose import POLICIES, choose_cache, make_cache, slot_policy
from headway.cache.decoder import DecoderCache
from headway.cache.encoder_decoder import EncoderDecoderCache
from headway.cache.kv_cache import KVCache
from headway.cache.layer_cache import Cache, LayerCache
from headway.cache.linear_attention import LinearAttentionCache
from headway.cache.page_table import PAGE, PageClass, PageTable
from headway.cache.paged_cache import PagedCache, PagedLayer, PagedStates
from headway.cache.pages import PagePool
from headway.cache.policy import Growing, Ring, SlotPolicy
from headway.cache.sequences import SequenceLengths
from headway.cache.spec import KV_DTYPES, CacheSpec, kv_dtype
from headway.cache.table import SlotTable

__all__ = [
    "KV_DTYPES",
    "PAGE",
    "POLICIES",
    "Cache",
    "CacheSpec",
    "DecoderCache",
    "EncoderDecoderCache",
    "Growing",
    "KVCache",
    "LayerCache",
    "LinearAttentionCache",
    "PageClass",
    "PagePool",
    "PageTable",
    "PagedCache",
    "PagedLayer",
    "PagedStates",
    "Ring",
    "SequenceLengths",
    "SlotPolicy",
    "SlotTable",
    "choose_cache",
    "kv_dtype",
    "make_cache",
    "slot_policy",
]
