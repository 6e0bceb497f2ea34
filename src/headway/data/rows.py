"""Rows of a fixed length over a token file, and batches of them.

For next-token prediction (`Rows`) a row is a window of the token stream: row i reads tokens [i*L, i*L + L) and is
trained to predict tokens [i*L + 1, i*L + L + 1). Every token but the first of each document is a target exactly once
per epoch, none is dropped, and only the last row may have empty slots. Documents in a row do not attend to each other
(`Tokens.packed`); the part of a document in the next row begins there at index 0, without its past.

For encoders (`MaskedRows`) each part of a document is wrapped in the tokenizer's template, [CLS] text [SEP].
"""

# Legend: B rows, L slots of a row.

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headway.data.masking import Masking
from headway.data.order import keyed
from headway.data.tokenfile import TokenFile
from headway.errors import DataError
from headway.nn import IGNORE_INDEX
from headway.tokens import Tokens

HELD_OUT = -1  # the draw of all evaluations; training steps are numbered from 0


class Batch(NamedTuple):
    """Keyword arguments of a model's forward, and its targets [B, L], `IGNORE_INDEX` in slots without a target."""

    inputs: Mapping[str, Any]
    targets: Tensor


class Span(NamedTuple):
    """Tokens start..stop-1 of the document with this number."""

    document: int
    start: int
    stop: int


def pack(
    lengths: Iterable[int], length: int, around: int = 0, *, alone: bool = False
) -> Iterator[list[Span]]:
    """Yields rows of `length` tokens, filled with documents of the given lengths in their order.

    All rows but the last are full: a document that does not fit is split and continues in the next row. `around` is the
    number of template tokens around each span ([CLS] .. [SEP] are 2); a row may then end with up to `around` empty
    slots. With `alone`, each row has one span.
    """
    _check_length(length, around)
    row: list[Span] = []
    free = length
    for document, n in enumerate(lengths):
        if n < 0:
            raise DataError(f"pack: document {document} has {n} tokens")
        at = 0
        while at < n:
            take = min(free - around, n - at)
            row.append(Span(document, at, at + take))
            at, free = at + take, free - take - around
            if alone or free <= around:
                yield row
                row, free = [], length
    if row:
        yield row


class PackedRow(NamedTuple):
    """A row of n tokens: ids [n], targets [n] (-100 in slots without a target), and the lengths of its documents."""

    ids: NDArray[np.int64]
    targets: NDArray[np.int64]
    lengths: list[int]


class RowSource(ABC):
    """`len(rows)` rows, accessed by number; random choices in them, if any, are a function of `draw`."""

    @abstractmethod
    def __len__(self) -> int: ...

    def drawn(self, draw: int) -> Self:
        """Returns the same rows with the random choices of step `draw`."""
        return self

    @abstractmethod
    def batch(self, indices: Sequence[int]) -> Any:
        """Returns these rows as a `Batch`, or as the type of batch that the task's `count` and `loss` take."""


class Rows(RowSource):
    """The rows of a token file: `len(rows)`, `rows[i]`, `rows.batch([..])`."""

    def __init__(self, file: TokenFile, length: int) -> None:
        _check_length(length)
        if len(file) < 2:
            raise DataError(f"{file.path}: {len(file)} tokens; at least 2 are needed to predict one")
        self.file, self.length = file, length

    def __len__(self) -> int:
        return -(-(len(self.file) - 1) // self.length)

    def __getitem__(self, i: int) -> PackedRow:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        begin = i * self.length
        window = np.asarray(self.file.tokens[begin : begin + self.length + 1], dtype=np.int64)
        ids, targets = window[:-1], window[1:].copy()
        n = len(ids)
        # Searched values have the dtype of `ends`: otherwise numpy would convert, and so copy, the whole memory map.
        edges_of_row = np.array([begin, begin + n], np.uint64)
        first, last = np.searchsorted(self.file.ends, edges_of_row, side="right")
        ends = np.asarray(self.file.ends[first:last], dtype=np.int64) - begin
        # documents end at tokens 3 and 9 (exclusive), row of tokens 0..7: ends [3]; slot 2 would predict the first
        # token of the next document and has no target; edges 0 3 8, lengths 3 and 5
        targets[ends - 1] = IGNORE_INDEX
        edges = [0, *ends[ends < n].tolist(), n]
        lengths = [b - a for a, b in pairwise(edges)]
        return PackedRow(ids, targets, lengths)

    def targets(self, limit: int | None = None) -> int:
        """Returns the number of targets of the first `limit` tokens: all but the last of each document have one."""
        tokens = len(self.file) if limit is None else min(limit, len(self.file))
        return tokens - int(np.searchsorted(self.file.ends, np.uint64(tokens), side="right"))

    def batch(self, indices: Sequence[int]) -> Batch:
        """Returns the batch of these rows."""
        return batch_of([self[i] for i in indices], self.length)


class MaskedRows(RowSource):
    """Rows of `length` slots over a token file, with masked tokens to predict: `len(rows)`, `rows[i]`,
    `rows.batch([..])`.

    A document that does not fit is split, and each part is wrapped in the template, so that the first token of every
    part is the template's. The parts in a row do not attend to each other (`Tokens.packed`). The mask of row i is a
    function of (seed, draw, i), whatever else is in the batch.

    Args:
        file: ids without a template (`encode_corpus(..., bos=False, eos=False)`).
        length: slots of a row, those of the template included.
        prefix: ids that the template puts before a text. suffix: ids after it.
        packed: whether a row holds parts of several documents; if not, it holds one, and its other slots are empty.
        global_first: whether the first token of each part, [CLS], is global.
    Raises DataError for rows too short for the template, and for a file whose documents have the template already.
    """

    def __init__(
        self,
        file: TokenFile,
        length: int,
        masking: Masking,
        *,
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        packed: bool = True,
        seed: int = 0,
        draw: int = HELD_OUT,
        global_first: bool = False,
    ) -> None:
        self.file, self.length, self.masking = file, length, masking
        self.seed, self.draw, self.global_first = seed, draw, global_first
        self.prefix, self.suffix = np.asarray(prefix, np.int64), np.asarray(suffix, np.int64)
        if len(prefix) and file.document(0)[: len(prefix)].tolist() == [*prefix]:
            raise DataError(
                f"{file.path}: its documents begin with {[*prefix]}, which the tokenizer's template would add again; "
                "encode the text with bos=False, eos=False"
            )
        begins = np.concatenate([[0], np.asarray(file.ends, np.int64)])
        first, parts = [0], []
        for row in pack(np.diff(begins).tolist(), length, len(prefix) + len(suffix), alone=not packed):
            parts += [(begins[span.document] + span.start, begins[span.document] + span.stop) for span in row]
            first.append(len(parts))
        self._first, self._parts = np.array(first), np.array(parts, np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._first) - 1

    def __getitem__(self, i: int) -> PackedRow:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        spans = [
            self.file.tokens[begin:end] for begin, end in self._parts[self._first[i] : self._first[i + 1]]
        ]
        parts = [np.concatenate([self.prefix, text, self.suffix], dtype=np.int64) for text in spans]
        masked = self.masking(np.concatenate(parts), keyed(self.seed, self.draw, i))
        return PackedRow(*masked, [len(part) for part in parts])

    def drawn(self, draw: int) -> Self:
        """Returns the same rows with the masks of step `draw`."""
        rows = copy(self)
        rows.draw = draw
        return rows

    def batch(self, indices: Sequence[int]) -> Batch:
        """Returns the batch of these rows."""
        return batch_of([self[i] for i in indices], self.length, self.global_first)


def batch_of(rows: Sequence[PackedRow], length: int, global_first: bool = False) -> Batch:
    """Returns rows as one batch [B, L], with id 0 in empty slots; the first token of each document may be global."""
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    targets = torch.full_like(ids, IGNORE_INDEX)
    for b, row in enumerate(rows):
        n = len(row.ids)
        ids[b, :n], targets[b, :n] = torch.from_numpy(row.ids), torch.from_numpy(row.targets)
    tokens = Tokens.packed([row.lengths for row in rows], total=length)
    if global_first:
        tokens = tokens.with_global(tokens.index == 0)
    return Batch({"ids": ids, "tokens": tokens}, targets)


def in_slots(rows: Iterable[int], lengths: Sequence[int], slots: int) -> list[list[int]]:
    """Cuts rows, in their order, into batches of at most `slots` slots, padding to the longest row included; a longer
    row is a batch of its own."""
    batches, longest = list[list[int]](), 0
    for i in rows:
        longest = max(longest, lengths[i])
        if not batches or longest * (len(batches[-1]) + 1) > slots:
            batches.append([])
            longest = lengths[i]
        batches[-1].append(i)
    return batches


def padded(rows: Sequence[Sequence[int] | NDArray[np.int64]], filler: int = 0) -> Tensor:
    """Returns lists of ids as a tensor [B, longest], padded on the right with `filler`."""
    return pad_sequence(
        [torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True, padding_value=filler
    )


def _check_length(length: int, around: int = 0) -> None:
    if length < 1:
        raise DataError(f"rows must have at least 1 token, got length {length}")
    if length <= around:
        raise DataError(
            f"rows of {length} tokens have no room for text beside the template's {around}; use longer rows"
        )
