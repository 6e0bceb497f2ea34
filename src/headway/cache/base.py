"""What every cache does: takes a chunk, answers with what its queries attend over, forgets, copies.

Legend: B rows, K kv heads, T slots of a chunk, S slots attended over, D per key, E per value.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from operator import add
from typing import Self, final

import torch
from torch import Tensor

from headway.attention import Keys
from headway.cache.buffer import Buffer
from headway.cache.chunk import Chunk, Lengths, read_chunk
from headway.errors import CacheError
from headway.tokens import Tokens


class Cache(ABC):
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
            keys and stores them rounded, with a float32 scale per token and kv head (`headway.attention.int8`);
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
    def update(self, k: Tensor, v: Tensor, tokens: Tokens) -> Keys:
        """Stores a chunk and returns what its queries attend over: past and chunk, as one set of keys.

        Args:
            k: keys [B, K, T, D].  v: values [B, K, T, E].
            tokens: of the chunk, [B|1, T]. In each row the indices go on where the row ended
                (`length`, `length` + 1, ...); empty slots (index -1, padding) may stand anywhere, need not be
                written with care and are not stored.
        Returns:
            Keys over S slots, in no order that one may rely on. They may be views of the cache: valid until
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
        new = Keys(k, v, tokens)
        keys = self._take(new.quantised() if self.dtype == torch.int8 else new, chunk, ends)
        self._lengths = ends
        return keys

    @abstractmethod
    def _take(self, new: Keys, chunk: Chunk, ends: Lengths) -> Keys:
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
        if tokens.device != own.k.device:
            raise CacheError(
                f"Cache.update: the tokens are on {tokens.device}, the cache is on {own.k.device}; "
                "move them: tokens.to(device)"
            )
        if tokens.rows not in (1, own.k.shape[0]):
            raise CacheError(
                f"Cache.update: tokens of {tokens.rows} rows for a cache of {own.k.shape[0]}; give one "
                "description per row, or one row that stands for all"
            )
        chunk = read_chunk(tokens)
        if chunk.start is not None and self._lengths == (chunk.start,) * len(self._lengths):
            return chunk
        for b, (start, length) in enumerate(
            zip(chunk.per_row(len(self._lengths))[0], self._lengths, strict=True)
        ):
            if start is not None and start != length:
                raise CacheError(
                    f"Cache.update: row {b} has seen {length} tokens, so the next index is {length}, but the "
                    f"chunk's first is {start}; number it from there (Tokens.range({tokens.count}, "
                    f"start={length}), DecoderCache.next_tokens), or trim the cache first"
                )
        return chunk

    # -- forgetting and copying ------------------------------------------------------------------------

    @final
    def trim(self, n: int | Sequence[int] | Tensor) -> None:
        """Forgets the last n tokens (of every row, or n[b] of row b).

        Raises CacheError when a row has seen fewer, or when the cache no longer holds what the tokens before
        them need; the cache is then as it was."""
        self.trim_to(self.after_trim(n))

    @final
    def after_trim(self, n: int | Sequence[int] | Tensor) -> Lengths:
        """What `lengths` would be after `trim(n)`, with its errors; changes nothing."""
        batch = len(self._lengths)
        given = n.tolist() if isinstance(n, Tensor) else n
        counts = (given,) * batch if isinstance(given, int) else tuple(given)
        if len(counts) != batch or not all(isinstance(count, int) for count in counts):
            raise CacheError(
                f"Cache.trim: give one whole number, or one for each of the {batch} rows, got {given}"
            )
        for b, (count, length) in enumerate(zip(counts, self._lengths, strict=True)):
            if not 0 <= count <= length:
                raise CacheError(f"Cache.trim: row {b} has seen {length} tokens and cannot forget {count}")
        ends = tuple(length - count for length, count in zip(self._lengths, counts, strict=True))
        self._may_trim(ends)
        return ends

    @final
    def trim_to(self, ends: Lengths) -> None:
        """Goes back to lengths that `after_trim` has given."""
        self._buffer.forget(torch.tensor(ends, dtype=torch.int64, device=self._buffer.k.device))
        self._lengths = ends
        self._trimmed()

    @abstractmethod
    def _may_trim(self, ends: Lengths) -> None:
        """Raises CacheError when rows cannot go back to these lengths."""

    @abstractmethod
    def _trimmed(self) -> None:
        """Called when tokens have been forgotten."""

    @final
    def fork(self) -> Self:
        """An independent copy: what happens to one is not seen in the other."""
        new = copy.copy(self)
        new._buffer = self._buffer.map_rows(Tensor.clone)
        return new

    @final
    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Row i becomes what row rows[i] was, for beams and for dropping finished rows; there may be more or
        fewer rows than before. Raises CacheError for a row that does not exist."""
        batch, device = len(self._lengths), self._buffer.k.device
        pick = torch.as_tensor(rows, dtype=torch.int64, device=device)
        chosen = pick.tolist()
        if pick.dim() != 1 or any(not 0 <= r < batch for r in chosen):
            raise CacheError(f"Cache.reorder: rows must be a list of numbers in 0..{batch - 1}, got {chosen}")
        self._buffer = self._buffer.map_rows(lambda t: t.index_select(0, pick))
        self._lengths = tuple(self._lengths[r] for r in chosen)
        self._reordered(chosen)

    @abstractmethod
    def _reordered(self, rows: list[int]) -> None:
        """Called when the rows have been chosen anew."""

    @final
    def reserve(self, tokens: int) -> None:
        """Makes room for rows of so many tokens at once, so that no later update has to; never shrinks."""
        self._buffer.grow(self._slots_for(tokens))

    @abstractmethod
    def _slots_for(self, tokens: int) -> int:
        """Slots that a row of so many tokens, none of them global, uses."""

    # -- what is known ---------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> Lengths:
        """Tokens that each row has seen (and not forgotten), as Python numbers."""
        return self._lengths

    @property
    def length(self) -> Tensor:
        """Tokens that each row has seen (and not forgotten).  int64 [B]"""
        return torch.tensor(self._lengths, dtype=torch.int64, device=self._buffer.k.device)

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
    @abstractmethod
    def bound(self) -> int | None:
        """The most slots that a row ever holds, however long it gets; None when there is no such number."""

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
