"""Whole examples, packed into rows: best-fit decreasing (Johnson 1973), a function of their lengths alone."""

from collections import deque
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from headway.data.chats import Examples
from headway.data.rows import Batch, PackedRow, RowSource, batch_of, padded
from headway.errors import DataError
from headway.nn import IGNORE_INDEX

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


class ChatRows(RowSource):
    """Rows of whole examples side by side, which do not see each other: `len(rows)`, `rows.batch([..])`.

    Trained tokens alone are targets. Rows have up to `length` slots, and a batch as many as its longest row. Without
    `pack`, a row has one example.
    """

    def __init__(self, examples: Examples, length: int, *, pack: bool = True) -> None:
        self.examples, self.length = examples, length
        self.rows = best_fit(examples.slots, length) if pack else [[i] for i in range(len(examples))]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> PackedRow:
        parts = [self.examples[k] for k in self.rows[i]]
        ids = np.concatenate([one.ids[:-1] for one in parts], dtype=np.int64)
        said = [np.where(turns[1:] > 0, ids[1:], IGNORE_INDEX) for ids, turns, _ in parts]
        return PackedRow(ids, np.concatenate(said, dtype=np.int64), [len(one.ids) - 1 for one in parts])

    def batch(self, indices: Sequence[int]) -> Batch:
        """The given rows."""
        rows = [self[i] for i in indices]
        return batch_of(rows, max(len(row.ids) for row in rows))

    def turns(self, indices: Sequence[int]) -> Tensor:
        """Of each target of `batch(indices)` [B, L], which answer of its conversation it is of: 1, 2, ...; else 0."""
        parts = [[self.examples[i].turns[1:] for i in self.rows[row]] for row in indices]
        return padded([np.concatenate(row) for row in parts])

    @property
    def used(self) -> int:
        """Slots that are not empty."""
        return sum(self.examples.slots)
