"""What a layer keeps of the tokens that it has seen, whatever it keeps: rows, lengths, and how they move.

Legend: B rows, T slots of a chunk.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self, final

import torch
from torch import Tensor

from headway.cache.chunk import Chunk, Lengths, read_chunk
from headway.errors import CacheError
from headway.tokens import Tokens


class LayerCache(ABC):
    """The past of one layer: keys and values (`Cache`), or the sums of linear attention (`LinearAttentionCache`).

    It knows how many tokens each of its B rows has seen, forgets the last ones where it can, copies itself and
    chooses rows. It holds no gradients.
    """

    _lengths: Lengths

    # -- forgetting and copying ------------------------------------------------------------------------

    @final
    def trim(self, n: int | Sequence[int] | Tensor) -> None:
        """Forgets the last n tokens (of every row, or n[b] of row b).

        Raises CacheError when a row has seen fewer, or when what the tokens before them need is no longer
        held; nothing is then changed."""
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
        self._lengths = ends
        self._forget(ends)

    @abstractmethod
    def _may_trim(self, ends: Lengths) -> None:
        """Raises CacheError when rows cannot go back to these lengths."""

    @abstractmethod
    def _forget(self, ends: Lengths) -> None:
        """Called when tokens have been forgotten: drops what was held of them."""

    @final
    def fork(self) -> Self:
        """An independent copy: what happens to one is not seen in the other."""
        new = copy.copy(self)
        new._map_rows(Tensor.clone)
        return new

    @final
    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Row i becomes what row rows[i] was, for beams and for dropping finished rows; there may be more or
        fewer rows than before. Raises CacheError for a row that does not exist."""
        batch = len(self._lengths)
        pick = torch.as_tensor(rows, dtype=torch.int64, device=self.device)
        chosen = pick.tolist()
        if pick.dim() != 1 or any(not 0 <= r < batch for r in chosen):
            raise CacheError(f"Cache.reorder: rows must be a list of numbers in 0..{batch - 1}, got {chosen}")
        self._map_rows(lambda t: t.index_select(0, pick))
        self._lengths = tuple(self._lengths[r] for r in chosen)
        self._reordered(chosen)

    @abstractmethod
    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Changes every tensor held; `change` acts on the first dimension, and copies."""

    @abstractmethod
    def _reordered(self, rows: list[int]) -> None:
        """Called when the rows have been chosen anew."""

    @abstractmethod
    def reserve(self, tokens: int) -> None:
        """Makes room for rows of so many tokens at once, so that no later update has to; never shrinks."""

    # -- taking a chunk --------------------------------------------------------------------------------

    def _read(self, tokens: Tokens) -> Chunk:
        """The chunk that these tokens are. Raises CacheError where they do not go on where the rows ended."""
        batch = len(self._lengths)
        if tokens.device != self.device:
            raise CacheError(
                f"Cache.update: the tokens are on {tokens.device}, the cache is on {self.device}; "
                "move them: tokens.to(device)"
            )
        if tokens.rows not in (1, batch):
            raise CacheError(
                f"Cache.update: tokens of {tokens.rows} rows for a cache of {batch}; give one "
                "description per row, or one row that stands for all"
            )
        chunk = read_chunk(tokens)
        if chunk.start is not None and self._lengths == (chunk.start,) * batch:
            return chunk
        for b, (start, length) in enumerate(zip(chunk.per_row(batch)[0], self._lengths, strict=True)):
            if start is not None and start != length:
                raise CacheError(
                    f"Cache.update: row {b} has seen {length} tokens, so the next index is {length}, but the "
                    f"chunk's first is {start}; number it from there (Tokens.range({tokens.count}, "
                    f"start={length}), DecoderCache.next_tokens), or trim the cache first"
                )
        return chunk

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
        return torch.tensor(self._lengths, dtype=torch.int64, device=self.device)

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of what is stored."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it is stored."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """The most slots that hold something now, over the rows."""

    @property
    @abstractmethod
    def bound(self) -> int | None:
        """The most slots that a row ever holds, however long it gets; None when there is no such number."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of allocated numbers."""
