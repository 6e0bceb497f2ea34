"""Bytes of keys and values, counted from the spec.

Legend: L layers, K kv heads, D per head, e bytes per number.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from headway.cache import slot_policy
from headway.models.cost.operations import keys_read
from headway.models.cost.weights import must_decode
from headway.models.spec import ModelSpec
from headway.patterns import Pattern
from headway.quantization import row_bytes


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of keys and values that one token has in all layers: 2 L K (D e), with e bytes per number; in
    int8, whose rows have a float32 scale, 2 L K (D + 4). With linear attention, which keeps sums, 0."""
    return 0 if spec.linear is not None else memory_bytes(spec, 1, dtype)


def memory_bytes(spec: ModelSpec, source: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> int:
    """Bytes of keys and values of so many last states of an encoder, in all layers: 2 L K (D e) for each."""
    return 2 * spec.layers * spec.kv_heads * row_bytes(spec.head_dim, dtype) * source * batch


def cache_slots(spec: ModelSpec, context: int) -> tuple[int, ...]:
    """Slots per row that each layer's cache holds after `context` tokens: all of them where it grows, at most
    its bound where it is a ring; 1 of linear attention. Raises ConfigError for an encoder, as the other two do."""
    must_decode(spec, "cache_slots")
    return tuple(1 if spec.linear is not None else _slots(p, context) for p in spec.patterns)


def kv_bytes_stored(
    spec: ModelSpec, context: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1
) -> int:
    """Bytes of keys and values that the caches of `batch` rows of `context` tokens hold.

    2 K (D e) bytes, in int8 2 K (D + 4), times the slots of each layer; of linear attention K F (D + 1) numbers of 4
    bytes or more and a count for each layer, with F features. (Those of an encoder's states: `memory_bytes`.)"""
    must_decode(spec, "kv_bytes_stored")
    if spec.linear is not None:
        return batch * spec.layers * (_sums(spec, dtype) + 8)
    return 2 * spec.kv_heads * row_bytes(spec.head_dim, dtype) * batch * sum(cache_slots(spec, context))


def kv_bytes_read(spec: ModelSpec, context: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> int:
    """Bytes of keys and values that one more token of `batch` rows of `context` tokens reads.

    2 (D e) bytes, in int8 2 (D + 4), times the keys that the last query sees, per kv head and layer: a kv
    head is read once for its whole group, and (`PerHead`) wherever one of the group looks. Linear attention reads its
    sums.
    """
    must_decode(spec, "kv_bytes_read")
    if spec.linear is not None:
        return batch * spec.layers * _sums(spec, dtype)
    read = sum(keys_read(p, context, spec.kv_heads) for p in spec.patterns)
    return 2 * row_bytes(spec.head_dim, dtype) * batch * read


def _sums(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of the sums of one layer and row of linear attention."""
    assert spec.linear is not None
    features = spec.linear.features(spec.head_dim)
    return spec.kv_heads * features * (spec.head_dim + 1) * max(4, dtype.itemsize)


@lru_cache(maxsize=512)
def _slots(pattern: Pattern, context: int) -> int:
    return slot_policy(pattern).most(context)
