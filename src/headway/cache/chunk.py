"""What a cache must know about the tokens that arrive, read once per `Tokens` and shared by all layers.

Legend: B rows, T slots of the chunk, N tokens in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from headway.errors import CacheError
from headway.tokens import Tokens

Lengths = tuple[int, ...]
Places = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Chunk:
    """Where the tokens of a chunk stand, in Python numbers, so that a cache need not wait for a device.

    Attributes:
        index: as in the Tokens.  int64 [B|1, T]
        starts: index of each row's first token; None where a row has none.  B or 1 entries
        counts: tokens of each row.  B or 1 entries
        start: every row is start, start+1, ... with no empty slot; None when that is not so.
        any_global: whether some token is global.
    """

    index: Tensor
    starts: tuple[int | None, ...]
    counts: Lengths
    start: int | None
    any_global: bool
    _places: dict[int, Places] = field(default_factory=dict)

    def per_row(self, batch: int) -> tuple[tuple[int | None, ...], Lengths]:
        """`starts` and `counts` with one entry for each of `batch` rows."""
        if len(self.counts) == batch:
            return self.starts, self.counts
        return self.starts * batch, self.counts * batch

    def places(self, batch: int) -> Places:
        """Row, column and index of every token, row by row and in order.  each int64 [N]"""
        if batch not in self._places:
            index = self.index.expand(batch, -1)
            rows, columns = (index >= 0).nonzero(as_tuple=True)
            self._places[batch] = (rows, columns, index[rows, columns])
        return self._places[batch]


# The layers of a decoder are given the same Tokens: what was read from it is kept as long as it lives.
_read: WeakKeyDictionary[Tokens, Chunk] = WeakKeyDictionary()


def read_chunk(tokens: Tokens) -> Chunk:
    """The chunk's facts. Raises CacheError for tokens that no cache can hold: packed documents, or indices
    that do not count up by one over the slots that are not empty."""
    chunk = _read.get(tokens)
    if chunk is None:
        chunk = _read[tokens] = _read_chunk(tokens)
    return chunk


def _read_chunk(tokens: Tokens) -> Chunk:
    index, valid = tokens.index, tokens.valid
    if tokens.document is not None and bool(((tokens.document != 0) & valid).any()):
        raise CacheError(
            "Cache.update: a cache holds one document per row, but these tokens are of several (packed); "
            "give each document its own row: Tokens.from_lengths instead of Tokens.packed"
        )
    any_global = tokens.is_global is not None and bool((tokens.is_global & valid).any())
    rows, slots = index.shape
    if slots == 0:
        return Chunk(index, (None,) * rows, (0,) * rows, None, False)
    if tokens.start is not None:
        return Chunk(index, (tokens.start,) * rows, (slots,) * rows, tokens.start, any_global)
    first = torch.where(valid, index, torch.iinfo(torch.int64).max).amin(1)
    rank = valid.long().cumsum(1) - 1
    broken = ((index - rank) != first.unsqueeze(1)) & valid
    if bool(broken.any()):
        b = int(broken.any(1).nonzero()[0, 0])
        raise CacheError(
            "Cache.update: the tokens of a row must come in order with no index left out (empty slots, -1, "
            f"may stand anywhere between them); row {b} has indices {index[b].tolist()}"
        )
    counts = tuple(valid.sum(1).tolist())
    starts = tuple(s if n else None for s, n in zip(first.tolist(), counts, strict=True))
    regular = len(set(starts)) == 1 and all(n == slots for n in counts)
    return Chunk(index, starts, counts, starts[0] if regular else None, any_global)
