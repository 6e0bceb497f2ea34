"""Documents side by side in rows of one length.

A row is a stretch of the token stream: row i reads tokens [i*L, i*L + L) and is trained to say tokens
[i*L + 1, i*L + L + 1). Every token but the first of each document is a target exactly once per epoch, none is
dropped, and only the last row may have empty slots. Documents in a row do not see each other
(`Tokens.packed`);
the part of a document that falls into the next row begins anew there, at index 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from headway.data.tokenfile import TokenFile
from headway.errors import DataError
from headway.nn import IGNORE_INDEX
from headway.tokens import Tokens

Batch = tuple[Tensor, Tensor, Tokens]
"""ids [B, L], targets [B, L] (`IGNORE_INDEX` where nothing is predicted), and the tokens' description."""


@dataclass(frozen=True)
class Span:
    """Tokens start..stop-1 of one document."""

    document: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def pack(lengths: Iterable[int], length: int, around: int = 0) -> Iterator[list[Span]]:
    """Rows of `length` tokens, filled with documents of the given lengths in their order.

    Rows are full but for the last; a document that does not fit is split, and goes on in the next row. With `around`,
    that many tokens of a template stand around each span ([CLS] .. [SEP] are 2), and a row may end with up to `around`
    empty slots.
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
            if free <= around:
                yield row
                row, free = [], length
    if row:
        yield row


def apart(lengths: Iterable[int], length: int, around: int = 0) -> Iterator[list[Span]]:
    """Rows of up to `length` tokens, each with a span of one document; `around` as in `pack`."""
    _check_length(length, around)
    room = length - around
    for document, n in enumerate(lengths):
        for at in range(0, n, room):
            yield [Span(document, at, min(at + room, n))]


@dataclass(frozen=True, eq=False)
class PackedRow:
    """ids [L] (0 in empty slots), targets [L] (-100 where nothing is to be said), lengths of its
    documents."""

    ids: Tensor
    targets: Tensor
    lengths: list[int]


class Rows:
    """The rows of a token file: `len(rows)`, `rows[i]`, `rows.batch([..])`."""

    covers_text: ClassVar[bool] = True
    """Every token but the first of each document is a target once, so that losses can be stated per byte."""

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
        length, begin = self.length, i * self.length
        window = np.asarray(self.file.tokens[begin : begin + length + 1], dtype=np.int64)
        n = len(window) - 1
        ids = np.zeros(length, np.int64)
        targets = np.full(length, IGNORE_INDEX, np.int64)
        ids[:n], targets[:n] = window[:-1], window[1:]
        edges_of_row = np.array([begin, begin + n], np.uint64)  # the same dtype: else numpy copies all ends
        first, last = np.searchsorted(self.file.ends, edges_of_row, side="right")
        ends = np.asarray(self.file.ends[first:last], dtype=np.int64) - begin
        targets[ends[(ends >= 1) & (ends <= n)] - 1] = IGNORE_INDEX
        edges = [0, *(int(e) for e in ends if 0 < e < n), n]
        lengths = [b - a for a, b in pairwise(edges)]
        return PackedRow(torch.from_numpy(ids), torch.from_numpy(targets), lengths)

    def drawn(self, draw: int) -> Rows:
        """The same rows: nothing in them is drawn."""
        return self

    def batch(self, indices: Sequence[int]) -> Batch:
        """The given rows."""
        rows = [self[i] for i in indices]
        ids, targets = torch.stack([r.ids for r in rows]), torch.stack([r.targets for r in rows])
        return ids, targets, Tokens.packed([r.lengths for r in rows], total=self.length)


def _check_length(length: int, around: int = 0) -> None:
    if length < 1:
        raise DataError(f"rows must have at least 1 token, got length {length}")
    if length <= around:
        raise DataError(
            f"rows of {length} tokens have no room for text between the template's {around}; use longer rows"
        )
