"""Keys and values of one layer, slot by slot. Which token a slot holds is the table's business.

Legend: B rows, K kv heads, S slots, D per key, E per value, T slots of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from headway.attention import KeyValues
from headway.cache.spec import CacheSpec
from headway.cache.table import Placement
from headway.errors import CacheError


class Storage:
    """k [B, K, S, D] and v [B, K, S, E]; in int8 with their scales, float32 [B, K, S] (`headway.quantization`).

    New memory is zeros, so that what was never written cannot hold NaN. Tensors are made outside inference mode, so
    that a cache filled there can be continued elsewhere.

    Attributes:
        tensors: k, v, and their scales in int8: in the order of `KeyValues.tensors`.
    """

    def __init__(self, spec: CacheSpec) -> None:
        shape = (spec.batch, spec.kv_heads, 0)
        with torch.inference_mode(False):
            self.tensors: tuple[Tensor, ...] = tuple(
                torch.zeros(*shape, size, dtype=spec.dtype, device=spec.device)
                for size in (spec.head_dim, spec.value_size)
            )
            if spec.dtype == torch.int8:
                self.tensors += tuple(torch.zeros(shape, device=spec.device) for _ in "kv")

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def slots(self) -> int:
        """Slots that memory is allocated for, S."""
        return self.tensors[0].shape[2]

    @property
    def nbytes(self) -> int:
        """(D + E) B K S bytes per number; in int8 with scales, (D + E + 8) B K S."""
        return sum(t.nbytes for t in self.tensors)

    def check(self, k: Tensor, v: Tensor, count: int) -> None:
        """Raises CacheError unless k [B, K, count, D] and v [B, K, count, E] can be stored."""
        for name, given, held in (("k", k, self.tensors[0]), ("v", v, self.tensors[1])):
            batch, heads, _, size = held.shape
            if given.shape != (batch, heads, count, size):
                raise CacheError(
                    f"Cache.update: {name} must be [batch, kv_heads, tokens, size] = {[batch, heads, count, size]} "
                    f"for this cache and these {count} tokens, got {list(given.shape)}"
                )
            int8 = held.dtype == torch.int8
            if (
                not (given.is_floating_point() if int8 else given.dtype == held.dtype)
                or given.device != held.device
            ):
                what = "rounds floating-point numbers to" if int8 else "holds"
                raise CacheError(
                    f"Cache.update: {name} is {given.dtype} on {given.device}, the cache {what} {held.dtype} "
                    f"on {held.device}; make the cache with the dtype and device of the keys"
                )
            if given.requires_grad and torch.is_grad_enabled():
                raise CacheError(
                    f"Cache.update: {name} requires a gradient, and a cache holds none: decode under "
                    "torch.no_grad() or torch.inference_mode(), or train without a cache"
                )

    def append(self, k: Tensor, v: Tensor, placement: Placement) -> KeyValues:
        """Stores a chunk where the table has placed it, and returns what its queries attend over."""
        tokens, past = placement.tokens, placement.past
        given = (k, v) if self.dtype != torch.int8 else KeyValues(k, v, tokens).quantized().tensors
        self.grow(placement.capacity)
        if past is None:
            self._write(given, placement)
            seen = [own.narrow(2, 0, tokens.count) for own in self.tensors]
        else:
            seen = [
                torch.cat([*(own.narrow(2, slot, count) for slot, count, _ in past), some], 2)
                if past
                else some
                for own, some in zip(self.tensors, given, strict=True)
            ]
            self._write(given, placement)
        return KeyValues(seen[0], seen[1], tokens, *seen[2:])

    def _write(self, given: tuple[Tensor, ...], placement: Placement) -> None:
        for own, some in zip(self.tensors, given, strict=True):
            if placement.at is not None:
                row_N, slot_N, column_N = placement.at
                whole = column_N is None
                own[row_N, :, slot_N] = (
                    some.transpose(1, 2).flatten(0, 1) if whole else some[row_N, :, column_N]
                )
            for slot, column, count in placement.runs:
                whole = count == some.shape[2]
                own.narrow(2, slot, count).copy_(some if whole else some.narrow(2, column, count))

    def grow(self, slots: int) -> None:
        """At least so many slots; the new ones are zeros."""
        more = slots - self.slots
        if more > 0:
            with torch.inference_mode(False):
                self.tensors = tuple(pad(t, (0, 0) * (t.dim() - 3) + (0, more)) for t in self.tensors)

    def select_rows(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was."""
        with torch.inference_mode(False):
            self.tensors = tuple(t.index_select(0, rows) for t in self.tensors)
