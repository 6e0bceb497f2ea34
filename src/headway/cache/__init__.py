"""Where past keys and values live: growing or ring, chosen from what later queries see; or the sums of them."""

from headway.cache.base import Cache
from headway.cache.choose import Kind, choose_cache, make_cache
from headway.cache.decoder import DecoderCache
from headway.cache.dtypes import KV_DTYPES, kv_dtype
from headway.cache.encoder_decoder import MemoryCache
from headway.cache.growing import GrowingCache
from headway.cache.layer_cache import Past
from headway.cache.linear_attention import StateCache
from headway.cache.ring import RingCache

__all__ = [
    "KV_DTYPES",
    "Cache",
    "DecoderCache",
    "GrowingCache",
    "Kind",
    "MemoryCache",
    "Past",
    "RingCache",
    "StateCache",
    "choose_cache",
    "kv_dtype",
    "make_cache",
]
