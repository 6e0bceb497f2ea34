"""What every cache does, that of one layer and that of all: numbers the next tokens, forgets, copies, chooses rows.

Legend: B rows, T slots of a chunk.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Self, final

import torch
from torch import Tensor

from headway.cache.sequences import Chunk, Documents, SequenceLengths, trimmed
from headway.cache.table import SlotTable
from headway.errors import CacheError
from headway.tokens import Tokens


class Cache(ABC):
    """The past of one layer (`LayerCache`), or of all layers of a decoder (`DecoderCache`).

    A row holds one document, or several packed side by side (`Tokens.packed`): a document is a sequence of its own,
    goes on from its own length, and no other sees it. Caches hold no gradients.
    """

    @property
    @abstractmethod
    def layers(self) -> Sequence[LayerCache]:
        """The layers, from the first to the last."""

    @property
    def _rows(self) -> Sequence[Documents]:
        """`documents`, not to be changed. Raises CacheError when layers disagree."""
        first = self.layers[0].seen
        for i, layer in enumerate(self.layers):
            if layer.seen is not first and layer.seen != first:
                raise _broken_off("layer 0", first, f"layer {i}", layer.seen)
        return first

    @property
    def documents(self) -> tuple[Documents, ...]:
        """Of each row, how many tokens each of its documents has seen (and not forgotten): {document: tokens}, with
        document 0 where rows are not packed."""
        return tuple(dict(row) for row in self._rows)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that each row has seen (and not forgotten), as Python numbers; of all its documents together."""
        return tuple(sum(row.values()) for row in self._rows)

    @property
    def length(self) -> Tensor:
        """`lengths` as a tensor, int64 [B]."""
        return torch.tensor(self.lengths, dtype=torch.int64, device=self.device)

    @property
    def batch(self) -> int:
        """Rows, B."""
        return len(self.layers[0].sequences.rows)

    @property
    def device(self) -> torch.device:
        """Where it is stored."""
        return self.layers[0].sequences.device

    # -- numbering what comes --------------------------------------------------------------------------

    @final
    def next_tokens(
        self, count: int, lengths: Sequence[int] | Tensor | None = None, side: str = "right"
    ) -> Tokens:
        """The tokens of the next chunk, numbered from where each row ended.

        Args:
            count: slots of the chunk, T.
            lengths: how many of them are tokens, per row [B]; all unless given.
            side: where the padding of shorter rows stands, "right" or "left".
        Returns:
            Tokens [B|1, T]; with `start` when all rows go on from one index without padding.
        Raises:
            CacheError: numbers that do not fit, or a row of several documents (`next_packed`).
        """
        if count < 0:
            raise CacheError(f"next_tokens: a chunk has 0 slots or more, got {count}")
        if side not in ("left", "right"):
            raise CacheError(f'next_tokens: side is "left" or "right", got {side!r}')
        for b, row in enumerate(self._rows):
            if not row.keys() <= {0}:
                raise CacheError(
                    f"next_tokens: row {b} has the documents {sorted(row)}; say which continue, and by how many "
                    "tokens: next_packed"
                )
        seen = self.lengths
        given = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        counts = (count,) * len(seen) if given is None else tuple(given)
        if len(counts) != len(seen) or any(not 0 <= n <= count for n in counts):
            raise CacheError(
                f"next_tokens: lengths must be {len(seen)} numbers in 0..{count}, one per row, "
                f"got {list(counts)}"
            )
        if len(set(seen)) == 1 and set(counts) == {count}:
            return Tokens.range(count, start=seen[0], device=self.device)
        size, begin = (
            torch.tensor(n, dtype=torch.int64, device=self.device).unsqueeze(1) for n in (counts, seen)
        )
        rank = torch.arange(count, device=self.device) - (count - size if side == "left" else 0)
        return Tokens(torch.where((rank >= 0) & (rank < size), begin + rank, -1))

    @final
    def next_packed(self, counts: Sequence[Mapping[int, int]], total: int | None = None) -> Tokens:
        """The tokens of the next chunk of packed rows: in row b, counts[b][d] tokens of each document d, numbered from
        where it ended, side by side in the order of counts[b]. A document that is new begins at 0.

        next_packed([{3: 1, 7: 4}]), where document 3 has seen 9 tokens: index 9 0 1 2 3, document 3 7 7 7 7.

        Args:
            counts: {document: tokens} of each row.
            total: slots of the chunk, T; those of the longest row unless given. The rest is empty.
        Raises:
            CacheError: numbers that do not fit.
        """
        rows = self._rows
        if len(counts) != len(rows) or any(n < 0 for row in counts for n in row.values()):
            raise CacheError(
                f"next_packed: give {{document: tokens}}, 0 tokens or more, for each of {len(rows)} rows, "
                f"got {list(counts)}"
            )
        longest = max((sum(row.values()) for row in counts), default=0)
        total = longest if total is None else total
        if longest > total:
            raise CacheError(f"next_packed: a row needs {longest} slots, but total is {total}")
        place = torch.full((2, len(rows), total), -1, dtype=torch.int64)
        for b, (row, new) in enumerate(zip(rows, counts, strict=True)):
            tokens = [(row.get(d, 0) + i, d) for d, n in new.items() for i in range(n)]
            place[:, b, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64).view(-1, 2).T
        index, document = place.to(self.device)
        return Tokens(index, document)

    # -- forgetting and copying ------------------------------------------------------------------------

    @final
    def trim(self, n: int | Sequence[int | Mapping[int, int]] | Tensor) -> None:
        """Forgets the last n tokens: of every row, n[b] of row b, or n[b][d] of document d of row b, which may be all
        of them, so that its slots are free.

        Raises CacheError when a sequence has seen fewer, or when what the tokens before them need is no longer
        held; nothing is then changed."""
        ends, layers = trimmed(self._rows, n), self._all_layers()
        for layer in layers:
            layer._check_trim(ends)
        for layer in layers:
            layer._set_rows(ends)
        for table in self._tables:
            table.trim(ends)

    @final
    def fork(self) -> Self:
        """An independent copy: what happens to one is not seen in the other."""
        self._all_layers()
        with torch.inference_mode(False):
            return copy.deepcopy(self)

    @final
    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Row i becomes what row rows[i] was, for beams and for dropping finished rows; there may be more or
        fewer rows than before. Raises CacheError for a row that does not exist."""
        batch, layers = self.batch, self._all_layers()
        pick = torch.as_tensor(rows, dtype=torch.int64, device=self.device)
        chosen = pick.tolist()
        if pick.dim() != 1 or any(not 0 <= r < batch for r in chosen):
            raise CacheError(f"Cache.reorder: rows must be a list of numbers in 0..{batch - 1}, got {chosen}")
        seen = self._rows
        picked = [seen[r] for r in chosen]
        for layer in layers:
            layer._set_rows(picked)
            layer._select_rows(pick)
        for table in self._tables:
            table.select_rows(pick)

    def reserve(self, tokens: int) -> None:
        """Makes room for rows of so many tokens at once, so that no later update has to; never shrinks."""
        for layer in self.layers:
            layer.reserve(tokens)

    @property
    def _tables(self) -> list[SlotTable]:
        return list(dict.fromkeys(layer.table for layer in self.layers if layer.table is not None))

    def _all_layers(self) -> Sequence[LayerCache]:
        """The layers. Raises CacheError where others share their tokens, which cannot be moved without them."""
        for sequences, here in Counter(layer.sequences for layer in self.layers).items():
            if sequences.layers != here:
                raise CacheError(
                    f"{type(self).__name__}: {here} of {sequences.layers} layers that share their lengths cannot be "
                    "trimmed, copied or reordered alone; use the DecoderCache that holds all of them"
                )
        return self.layers

    # -- what is stored --------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """The most slots that hold a token now, over the rows; summed over the layers."""
        return sum(layer.slots for layer in self.layers)

    @property
    def bound(self) -> int | None:
        """The most slots that a row of as many documents and global tokens ever holds, however long it gets, summed
        over the layers; None when a layer has no such number."""
        bounds = [layer.bound for layer in self.layers]
        return None if None in bounds else sum(b for b in bounds if b is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of allocated keys and values, or of sums, in all layers."""
        return sum(layer.nbytes for layer in self.layers)


class LayerCache(Cache):
    """The past of one layer: keys and values (`KVCache`), or the sums of linear attention (`LinearAttentionCache`).

    The layers of a decoder share `sequences`, and layers that retain the same tokens share their `table`. The first
    layer that is given a chunk has it validated and placed; the others follow it. `seen`: `sequences.rows` when the
    layer was last given a chunk.
    """

    table: SlotTable | None = None

    def __init__(self, sequences: SequenceLengths) -> None:
        self.sequences, self.seen = sequences, sequences.rows
        sequences.layers += 1

    @property
    def layers(self) -> Sequence[LayerCache]:
        """This one."""
        return (self,)

    def _chunk(self, tokens: Tokens) -> Chunk:
        """The chunk of these tokens. Raises CacheError where they do not go on where the rows ended, or are not what
        the layers before were given."""
        sequences = self.sequences
        if self.seen is sequences.rows:
            return sequences.append(tokens)
        chunk = sequences.chunk
        if chunk is None or self.seen is not chunk.before or not chunk.is_of(tokens):
            raise _broken_off("a layer before", sequences.rows, "this one", self.seen)
        return chunk

    def _set_rows(self, rows: Sequence[Documents]) -> None:
        self.sequences.rows = self.seen = rows
        self.sequences.chunk = None

    @abstractmethod
    def _check_trim(self, ends: Sequence[Documents]) -> None:
        """Raises CacheError when rows cannot go back to these lengths."""

    @abstractmethod
    def _select_rows(self, rows: Tensor) -> None:
        """Chooses rows of what the layer alone holds."""


def _broken_off(
    first: str, before: Sequence[Documents], second: str, after: Sequence[Documents]
) -> CacheError:
    """The error of layers that have not seen the same tokens."""
    one, other = ([sum(row.values()) for row in rows] for rows in (before, after))
    return CacheError(
        f"DecoderCache: {first} has seen {one} tokens per row, {second} {other}: a forward pass was broken off between "
        "them; start with a new cache, or fork() before a pass that may fail"
    )
