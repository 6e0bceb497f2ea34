"""What every cache does: takes a chunk, answers with what its queries attend over, forgets, copies.

Legend: B rows, K kv heads, T slots of a chunk, S slots attended over, D per key, E per value.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from operator import add
from typing import final

import torch
from torch import Tensor

from headway.attention import KeyValues
from headway.cache.buffer import Buffer
from headway.cache.chunk import Chunk, Lengths
from headway.cache.layer_cache import LayerCache
from headway.errors import CacheError
from headway.tokens import Tokens


class Cache(LayerCache):
    """The past keys and values of one layer.

    Law: for any way to cut a sequence into chunks, attending with each chunk's queries over the Keys that
    `update` returns for it equals attending over the whole sequence at once, for every pattern that the cache
    was chosen for (`choose_cache`).

    A slot carries its token (index, is_global, position), and patterns read that, never a slot's number; an
    empty slot has index -1. `is_global` and `position` are frozen when a token is stored. Caches hold no
    gradients.

    Args:
        batch: rows, B.
        kv_heads: heads that keys and values have, K; several query heads may share one.
        head_dim: size of a key, D.
        value_dim: size of a value, E; D unless given.
        dtype, device: of what is stored; `update` takes these and no others. torch.int8 takes any floating-point
            keys and stores them rounded, with a float32 scale per token and kv head (`headway.quantization`);
            what a chunk's own queries attend over is rounded too, so that the law holds.
    """

    def __init__(
        self,
        *,
        batch: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
        bad = [f"{name}={n}" for name, n in sizes.items() if n < 1] + [f"batch={batch}"] * (batch < 0)
        if bad:
            raise CacheError(f"{type(self).__name__}: sizes must be positive, got {', '.join(bad)}")
        if not (dtype.is_floating_point or dtype == torch.int8):
            raise CacheError(
                f"{type(self).__name__}: keys are stored as floating-point numbers or as torch.int8, not as {dtype}"
            )
        where = torch.zeros(0, device=device).device
        self._buffer = Buffer.empty(batch, kv_heads, head_dim, value_dim, dtype, where)
        self._lengths: Lengths = (0,) * batch

    # -- taking a chunk --------------------------------------------------------------------------------

    @final
    def update(self, k: Tensor, v: Tensor, tokens: Tokens) -> KeyValues:
        """Stores a chunk and returns what its queries attend over: past and chunk, as one set of keys.

        Args:
            k: keys [B, K, T, D].  v: values [B, K, T, E].
            tokens: of the chunk, [B|1, T]. In each row the indices go on where the row ended
                (`length`, `length` + 1, ...); empty slots (index -1, padding) may stand anywhere, need not be
                written with care and are not stored.
        Returns:
            KeyValues over S slots, in no order that one may rely on. They may be views of the cache: valid until
            its next change. `tokens.start` is set whenever the keys are in order, so that fast kernels apply.
        Raises:
            CacheError: shapes, dtype, device or indices do not fit, gradients are asked for, or the tokens
                are of several documents. The cache is then as it was.
        """
        chunk = self._accept(k, v, tokens)
        batch = self._buffer.k.shape[0]
        ends = tuple(map(add, self._lengths, chunk.per_row(batch)[1]))
        if tokens.document is not None or tokens.start != chunk.start:
            tokens = replace(tokens, document=None, start=chunk.start)
        new = KeyValues(k, v, tokens)
        keys = self._take(new.quantized() if self.dtype == torch.int8 else new, chunk, ends)
        self._lengths = ends
        return keys

    @abstractmethod
    def _take(self, new: KeyValues, chunk: Chunk, ends: Lengths) -> KeyValues:
        """Stores an accepted chunk after which row b has seen ends[b] tokens."""

    def _accept(self, k: Tensor, v: Tensor, tokens: Tokens) -> Chunk:
        own = self._buffer
        for name, given, held in (("k", k, own.k), ("v", v, own.v)):
            want = (held.shape[0], held.shape[1], tokens.count, held.shape[3])
            if tuple(given.shape) != want:
                raise CacheError(
                    f"Cache.update: {name} must be [batch, kv_heads, tokens, size] = {list(want)} for this "
                    f"cache and these {tokens.count} tokens, got {list(given.shape)}"
                )
            takes = given.is_floating_point() if held.dtype == torch.int8 else given.dtype == held.dtype
            if not takes or given.device != held.device:
                what = "rounds floating-point numbers to" if held.dtype == torch.int8 else "holds"
                raise CacheError(
                    f"Cache.update: {name} is {given.dtype} on {given.device}, the cache {what} {held.dtype} "
                    f"on {held.device}; make the cache with the dtype and device of the keys"
                )
            if given.requires_grad and torch.is_grad_enabled():
                raise CacheError(
                    f"Cache.update: {name} requires a gradient, and a cache holds none: decode under "
                    "torch.no_grad() or torch.inference_mode(), or train without a cache"
                )
        return self._read(tokens)

    # -- forgetting and copying ------------------------------------------------------------------------

    def _forget(self, ends: Lengths) -> None:
        self._buffer.forget(torch.tensor(ends, dtype=torch.int64, device=self._buffer.k.device))
        self._trimmed()

    @abstractmethod
    def _trimmed(self) -> None:
        """Called when tokens have been forgotten."""

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        self._buffer = self._buffer.map_rows(change)

    @final
    def reserve(self, tokens: int) -> None:
        self._buffer.grow(self._slots_for(tokens))

    @abstractmethod
    def _slots_for(self, tokens: int) -> int:
        """Slots that a row of so many tokens, none of them global, uses."""

    # -- what is known ---------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        return self._buffer.k.dtype

    @property
    def device(self) -> torch.device:
        return self._buffer.k.device

    @property
    def slots(self) -> int:
        """The most slots that hold a token now, over the rows."""
        held = self._buffer.held()
        return int(held.max()) if len(held) else 0

    @property
    def capacity(self) -> int:
        """Slots that memory is allocated for now, per row."""
        return self._buffer.slots

    @property
    def nbytes(self) -> int:
        """Bytes of allocated keys and values: (D + E) * B * K * capacity * bytes per number; in int8 with
        their scales, (D + E + 8) * B * K * capacity."""
        return self._buffer.nbytes

    def __repr__(self) -> str:
        b, k, _, d = self._buffer.k.shape
        return (
            f"{type(self).__name__}(batch={b}, kv_heads={k}, head_dim={d}, lengths={list(self._lengths)}, "
            f"capacity={self.capacity}, bound={self.bound}, {self.dtype})"
        )
