"""Where past keys and values live: growing or ring, chosen from what later queries see; or the sums of them."""

from headway.cache.base import Cache
from headway.cache.choose import Kind, choose_cache, make_cache
from headway.cache.decoder import DecoderCache
from headway.cache.dtypes import KV_DTYPES, kv_dtype
from headway.cache.encoder_decoder import EncoderDecoderCache
from headway.cache.growing import GrowingCache
from headway.cache.layer_cache import LayerCache
from headway.cache.linear_attention import LinearAttentionCache
from headway.cache.ring import RingCache

__all__ = [
    "KV_DTYPES",
    "Cache",
    "DecoderCache",
    "EncoderDecoderCache",
    "GrowingCache",
    "Kind",
    "LayerCache",
    "LinearAttentionCache",
    "RingCache",
    "choose_cache",
    "kv_dtype",
    "make_cache",
]
