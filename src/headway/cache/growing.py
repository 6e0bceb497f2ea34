"""A cache that keeps every token."""

from __future__ import annotations

from typing import final

from headway.attention import KeyValues
from headway.cache.base import Cache
from headway.cache.chunk import Chunk, Lengths


@final
class GrowingCache(Cache):
    """Keeps every token, for patterns whose later queries may look back any distance.

    The slot of a token is its index: padding takes no room, and rows are compact. The buffer doubles when it
    is full, so that n one-token updates copy O(n) slots in all; `reserve` makes the room beforehand.
    """

    def _take(self, new: KeyValues, chunk: Chunk, ends: Lengths) -> KeyValues:
        own, longest = self._buffer, max(ends, default=0)
        if longest > own.slots:
            own.grow(max(longest, 2 * own.slots))
        if chunk.start is not None:
            own.write_run(chunk.start, new, 0, new.tokens.count)
        else:
            rows, columns, index = chunk.places(len(ends))
            own.write_at(rows, index, new, columns)
        alike = len(set(ends)) == 1
        return own.view(0, longest, alike=alike, start=0 if alike else None)

    def _may_trim(self, ends: Lengths) -> None:
        """Always: every token is there."""

    def _trimmed(self) -> None:
        """Nothing else to keep."""

    def _reordered(self, rows: list[int]) -> None:
        """Nothing else to keep."""

    def _slots_for(self, tokens: int) -> int:
        return tokens

    @property
    def bound(self) -> None:
        """There is none."""
        return None
