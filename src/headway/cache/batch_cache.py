"""The cache of a batch whose rows are decoded together by calling the model directly, without an engine.

Legend: B rows, T slots of a chunk, N tokens of it, S slots of a source, M width, K kv heads, D per key.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.attention import KeyValues
from headway.cache.page_table import PAGE, PageTable
from headway.cache.paged_cache import PagedCache
from headway.cache.pages import PagePool
from headway.errors import CacheError
from headway.tokens import Tokens


@dataclass(frozen=True, eq=False)
class Packed:
    """The N tokens of a chunk [B, T], packed side by side into one row, without its empty slots.

    tokens: [1, N]; those of row `rows[d]` are document d.   at: [N], their indices among all B T slots.
    """

    tokens: Tokens
    rows: Sequence[int]
    at: Tensor

    def take(self, x: Tensor) -> Tensor:
        """Packs [B, T, ...] -> [1, N, ...]."""
        return x.flatten(0, 1)[self.at].unsqueeze(0)

    def put(self, x: Tensor, batch: int, count: int) -> Tensor:
        """Unpacks [1, N, M] -> [B, T, M], with 0 in empty slots."""
        if len(self.at) < batch * count:
            x = x.new_zeros(batch * count, x.shape[2]).index_copy(0, self.at, x[0])
        return x.view(batch, count, x.shape[-1])

    def slots(self, slots: Tensor, count: int) -> Tensor:
        """Maps slots [B, n] of rows of T = `count` to slots of the packed row, [1, B n]; empty slots map to arbitrary
        ones."""
        # B = T = 2, one empty slot: at [0, 1, 3] -> packed [0, 1, 0, 2]
        packed = self.at.new_zeros(len(slots) * count)
        packed[self.at] = torch.arange(len(self.at), device=self.at.device)
        row_starts = count * torch.arange(len(slots), device=self.at.device)
        return packed[slots + row_starts.unsqueeze(1)].view(1, -1)

    def side_by_side(self, keys: KeyValues) -> KeyValues:
        """Packs the keys [B, K, S, D] of each row's source into one row, as documents: [1, K, B S, D]."""
        rows = torch.tensor(self.rows, device=keys.k.device)
        k, v = (t[rows].transpose(0, 1).flatten(1, 2).unsqueeze(0) for t in (keys.k, keys.v))
        tokens = keys.tokens.expand(len(keys.k)).select_rows(rows)
        document = torch.arange(len(rows), device=rows.device).unsqueeze(1).expand_as(tokens.index)
        if len(rows) == 1:
            return KeyValues(k, v, tokens)
        return KeyValues(k, v, replace(tokens, document=document).map(lambda t: t.reshape(1, -1)))


class BatchCache:
    """The KV cache of B rows, in all layers of a decoder: each row is a sequence in the pages of a `PagedCache`.

        cache = model.make_cache(2)
        logits = model(ids, cache=cache)                 # [2, T, V]: the next T tokens of both rows
        logits = model(ids, tokens=cache.next_tokens(4, [4, 2]), cache=cache)     # padding behind the second row's two

    Invariant: however rows are split into chunks, with padding anywhere, the logits are those of one full forward over
    each row. A token that is marked global when it is stored (`Tokens.with_global`) stays global. Caches hold no
    gradients.

    Args:
        pages: where keys and values, or states, are stored; used by this cache and its forks alone.
        batch: number of rows, B.

    Raises CacheError for a negative number of rows.
    """

    def __init__(self, pages: PagedCache, batch: int) -> None:
        if batch < 0:
            raise CacheError(f"BatchCache: batch must be 0 or more, got {batch}")
        self.pages, self.tables = pages, [pages.open() for _ in range(batch)]
        self._is_broken = False
        weakref.finalize(self, _close, pages.pool, self.tables)

    def __len__(self) -> int:
        return len(self.pages)

    def __repr__(self) -> str:
        return f"BatchCache(batch={self.batch}, lengths={list(self.lengths)}, nbytes={self.nbytes})"

    @property
    def batch(self) -> int:
        """Number of rows, B."""
        return len(self.tables)

    @property
    def device(self) -> torch.device:
        """The device of its pages."""
        return self.pages.device

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each row (without those that were trimmed)."""
        return tuple(map(len, self.tables))

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that rows use, in all layers; a page that several rows share counts once."""
        return sum(
            kind.nbytes * len({page for table in self.tables for page in table.pages[of]} - {None})
            for of, kind in enumerate(self.pages.pool.classes)
        )

    @property
    def slots(self) -> tuple[int, ...]:
        """For each layer, the slots of the pages that the row with the most pages uses; 64 for a layer of states."""
        counts_of_rows = [
            [sum(page is not None for page in pages) for pages in table.pages] for table in self.tables
        ]
        layers = self.pages.layers
        # the caches of parallel mixers (`beside`) come last
        main_layers = layers[: len(layers) - sum(layer.beside is not None for layer in layers)]
        return tuple(
            PAGE * max((counts[layer.of] for counts in counts_of_rows), default=0) for layer in main_layers
        )

    def next_tokens(
        self, count: int, lengths: Sequence[int] | Tensor | None = None, side: str = "right"
    ) -> Tokens:
        """Returns the tokens of the next chunk, numbered from where each row ended.

        Args:
            count: slots of the chunk, T.
            lengths: number of tokens per row [B], the other slots are padding; T unless given.
            side: on which side shorter rows are padded, "right" or "left".
        Returns:
            Tokens [B|1, T]; with `start` if all rows continue from the same index without padding.
        Raises:
            CacheError: for numbers that do not fit.
        """
        if count < 0:
            raise CacheError(f"next_tokens: count must be 0 or more, got {count}")
        if side not in ("left", "right"):
            raise CacheError(f'next_tokens: side must be "left" or "right", got {side!r}')
        row_lengths = self.lengths
        numbers = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        counts = (count,) * len(row_lengths) if numbers is None else tuple(numbers)
        if len(counts) != len(row_lengths) or any(not 0 <= n <= count for n in counts):
            raise CacheError(
                f"next_tokens: lengths must be {len(row_lengths)} numbers in 0..{count}, one per row, "
                f"got {list(counts)}"
            )
        if len(set(row_lengths)) == 1 and set(counts) == {count}:
            return Tokens.range(count, start=row_lengths[0], device=self.device)
        size, begin = (torch.tensor(n, device=self.device).view(-1, 1) for n in (counts, row_lengths))
        rank = torch.arange(count, device=self.device) - (count - size if side == "left" else 0)
        return Tokens(torch.where((rank >= 0) & (rank < size), begin + rank, -1))

    # -- steps -----------------------------------------------------------------------------------------

    @contextmanager
    def step(self, tokens: Tokens) -> Iterator[Packed]:
        """While open, layers store the tokens [B|1, T] of a chunk, which are yielded packed.

        Raises CacheError, and changes nothing, unless each row's indices continue where it ended, without gaps; and
        after a step that was aborted."""
        if self._is_broken:
            raise CacheError(
                "BatchCache: a forward pass failed midway, so layers hold different tokens; start with a new cache, "
                "or fork() before a pass that may fail"
            )
        packed, counts, marks = self._read(tokens)
        before = {row: set(self.tables[row].globals) for row in marks}
        for row, marked in marks.items():
            self.tables[row].globals |= marked
        chunks = [(self.tables[row], [0] * n) for row, n in zip(packed.rows, counts, strict=True)]
        try:
            begun = self.pages.begin(chunks)
        except CacheError:
            for row, marked in before.items():
                self.tables[row].globals = marked
            raise
        self._is_broken = True
        yield replace(packed, tokens=begun)
        self.pages.end()
        self._is_broken = False

    def _read(self, tokens: Tokens) -> tuple[Packed, list[int], dict[int, set[int]]]:
        """Returns the packed tokens of a chunk, the number of tokens of each row with tokens, and the global tokens of
        rows that have some."""
        if tokens.device != self.device:
            raise CacheError(
                f"BatchCache: the tokens are on {tokens.device}, the cache is on {self.device}; "
                "move them: tokens.to(device)"
            )
        if tokens.rows not in (1, self.batch):
            raise CacheError(
                f"BatchCache: tokens of {tokens.rows} rows for a cache of {self.batch}; give one row of tokens for "
                "each, or one for all"
            )
        if tokens.position is not None or bool((tokens.documents * tokens.valid).any()):
            raise CacheError(
                "BatchCache: tokens must not have documents or positions, since a row is one text; make them with "
                "next_tokens"
            )
        expanded = tokens.expand(self.batch)
        index_BT, global_BT = expanded.index.cpu(), expanded.globals.cpu()
        rows, counts, marks = [], [], {}
        for row, seen in enumerate(self.lengths):
            index = index_BT[row][index_BT[row] >= 0].tolist()
            if index != [*range(seen, seen + len(index))]:
                raise CacheError(
                    f"BatchCache: row {row} has seen {seen} tokens, so the next indices are {seen}, {seen + 1}, ..., "
                    f"but the chunk has {index_BT[row].tolist()}; number it from there (next_tokens), or trim first"
                )
            if index:
                rows.append(row)
                counts.append(len(index))
            if marked := {*index_BT[row][global_BT[row]].tolist()} - {-1}:
                marks[row] = marked
        at = expanded.valid.flatten().nonzero()[:, 0]
        return Packed(tokens, rows, at), counts, marks

    # -- trimming and copying --------------------------------------------------------------------------

    def trim(self, n: int | Sequence[int] | Tensor) -> None:
        """Discards the last n tokens of every row, or n[b] of row b.

        Raises CacheError, and changes nothing, if a row has fewer, if keys that the tokens before them attend to have
        been released (`slack`), and for states, from which no token can be removed."""
        numbers = n.tolist() if isinstance(n, Tensor) else n
        counts = numbers if isinstance(numbers, Sequence) else [numbers] * self.batch
        if len(counts) != self.batch or not all(isinstance(count, int) for count in counts):
            raise CacheError(
                f"BatchCache.trim: give one whole number, or one for each of the {self.batch} rows, got {numbers}"
            )
        pool = self.pages.pool
        for table, count in zip(self.tables, counts, strict=True):
            pool.check_trim(table, count)
        for table, count in zip(self.tables, counts, strict=True):
            pool.trim(table, count)

    def fork(self) -> "BatchCache":
        """Returns an independent copy; pages are shared until one of the two writes to them."""
        copy = BatchCache(self.pages, 0)
        copy.tables += map(self.pages.pool.fork, self.tables)
        copy._is_broken = self._is_broken
        return copy

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Makes row i what row rows[i] was; the number of rows may change. Raises CacheError for a row that does not
        exist."""
        numbers = rows.tolist() if isinstance(rows, Tensor) else list(rows)
        if any(row not in range(self.batch) for row in numbers):
            raise CacheError(f"BatchCache.reorder: rows are numbers in 0..{self.batch - 1}, got {numbers}")
        tables = [self.pages.pool.fork(self.tables[row]) for row in numbers]
        _close(self.pages.pool, self.tables)
        self.tables[:] = tables


def _close(pool: PagePool, tables: Sequence[PageTable]) -> None:
    for table in tables:
        pool.close(table)
