"""Whole examples, packed into rows: best-fit decreasing (Johnson 1973), a function of their lengths alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.data.chats import Examples
from headway.data.rows import Batch
from headway.errors import DataError
from headway.nn import IGNORE_INDEX
from headway.tokens import Tokens

# Legend: B rows, L slots of a row.


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """The numbers of the examples in each row of `room` slots.

    The longest is placed first (of equals the first), each where it leaves the least room (of equals, where that room
    has been longest), or in a row of its own. There is a bit for each room that some row has left, so that a place is
    found at once: a million examples take seconds.

    Raises DataError for an example that no row holds.
    """
    rows: list[list[int]] = []
    with_room: list[deque[int]] = [deque() for _ in range(room + 1)]
    bits = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        n = lengths[i]
        if not 0 <= n <= room:
            raise DataError(f"example {i} needs {n} slots, and a row has {room}")
        fitting = bits >> n
        if fitting:
            free = n + (fitting & -fitting).bit_length() - 1
            row = with_room[free].popleft()
            if not with_room[free]:
                bits ^= 1 << free
            rows[row].append(i)
        else:
            free, row = room, len(rows)
            rows.append([i])
        with_room[free - n].append(row)
        bits |= 1 << (free - n)
    return rows


def naive_best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """The same by looking at every row."""
    rows: list[list[int]] = []
    order: list[int] = []  # rows, those that were touched last at the end
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        left = {row: room - sum(lengths[j] for j in rows[row]) for row in order}
        fitting = [row for row in order if left[row] >= lengths[i]]
        if fitting:
            row = min(fitting, key=lambda row: left[row])
            order.remove(row)
            rows[row].append(i)
        else:
            row = len(rows)
            rows.append([i])
        order.append(row)
    return rows


@dataclass(frozen=True, eq=False)
class ChatRows:
    """Rows of whole examples side by side, which do not see each other: `len(rows)`, `rows.batch([..])`.

    Trained tokens alone are targets. Rows have up to `length` slots, and a batch as many as its longest row.
    """

    examples: Examples
    rows: Sequence[Sequence[int]]
    length: int

    @staticmethod
    def of(examples: Examples, length: int, *, pack: bool = True) -> ChatRows:
        """Rows of up to `length` slots; without `pack`, of one example each."""
        numbers = best_fit(examples.slots, length) if pack else [[i] for i in range(len(examples))]
        return ChatRows(examples, numbers, length)

    def __len__(self) -> int:
        return len(self.rows)

    def drawn(self, draw: int) -> ChatRows:
        """The same rows: nothing in them is drawn."""
        return self

    def batch(self, indices: Sequence[int]) -> Batch:
        """The given rows."""
        parts = [[self.examples[i] for i in self.rows[row]] for row in indices]
        lengths = [[len(ids) - 1 for ids, _ in row] for row in parts]
        length = max(map(sum, lengths))
        ids = _filled([[ids[:-1] for ids, _ in row] for row in parts], length, 0)
        said = [[np.where(turns[1:] > 0, ids[1:], IGNORE_INDEX) for ids, turns in row] for row in parts]
        tokens = Tokens.packed(lengths, total=length)
        return Batch({"ids": ids, "tokens": tokens}, _filled(said, length, IGNORE_INDEX))

    def turns(self, indices: Sequence[int]) -> Tensor:
        """Of each target of `batch(indices)` [B, L], which answer of its conversation it is of: 1, 2, ...; else 0."""
        parts = [[self.examples[i].turns[1:] for i in self.rows[row]] for row in indices]
        return _filled(parts, max(sum(map(len, row)) for row in parts), 0)

    @property
    def used(self) -> int:
        """Slots that are not empty."""
        return sum(self.examples.slots)


def _filled(rows: Sequence[Sequence[NDArray[np.int64]]], length: int, filler: int) -> Tensor:
    found = np.full((len(rows), length), filler, np.int64)
    for row, parts in zip(found, rows, strict=True):
        whole = np.concatenate(parts)
        row[: len(whole)] = whole
    return torch.from_numpy(found)
