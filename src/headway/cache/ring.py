"""A cache of bounded size, for windows.

Legend: B rows, K kv heads, T slots of a chunk, D per key, E per value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch

from headway.attention import KeyValues
from headway.cache.base import Cache
from headway.cache.buffer import Buffer
from headway.cache.chunk import Chunk, Lengths
from headway.errors import CacheError


@final
class RingCache(Cache):
    """Keeps the last `reach` tokens, those that are pinned, and a few more.

    Slots of a row, with R = reach + 1 + slack:

        [ sinks | ring of R | global tokens ]

    Token i is at slot i when i < sinks; after the ring, in order of arrival, when it is global (and
    `globals`); else at slot sinks + (i - sinks) mod R. So a row that has not filled the ring is in order,
    like a growing cache, and memory is allocated only as far as rows have come.

    A chunk is written first and the slots themselves are attended over (no copy) when that overwrites nothing
    that its own queries may see: T <= slack + 1, or the ring is not yet full. Otherwise past and chunk are
    put side by side, attended over, and the chunk's tail is stored; a chunk may be longer than the window.

    Args:
        reach: how many tokens back a later query may see: t - reach <= k.index <= t.
        sinks: the first tokens of a row, kept for ever.
        globals: keep global tokens for ever, too.
        slack: how many tokens more are kept, so that drafts may be taken back; one-token updates with
            slack s can be trimmed by s + 1 at any time.
    """

    def __init__(
        self,
        *,
        reach: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        sinks: int = 0,
        globals: bool = False,
        slack: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            batch=batch,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype=dtype,
            device=device,
        )
        if min(reach, sinks, slack) < 0:
            raise CacheError(
                "RingCache: reach, sinks and slack count tokens, got "
                f"reach={reach}, sinks={sinks}, slack={slack}"
            )
        self.reach, self.sinks, self.slack, self.globals = reach, sinks, slack, globals
        self._ring = reach + 1 + slack
        # Of the tokens that are not pinned, row b holds those with index _floors[b] <= index < length.
        self._floors: Lengths = (0,) * batch
        self._pinned: Lengths = (0,) * batch

    @property
    def bound(self) -> int:
        """sinks + reach + 1 + slack, and one slot for each global token of the row that has most of them."""
        return self.sinks + self._ring + max(self._pinned, default=0)

    def _slots_for(self, tokens: int) -> int:
        return min(tokens, self.sinks + self._ring)

    # -- taking a chunk --------------------------------------------------------------------------------

    def _take(self, new: KeyValues, chunk: Chunk, ends: Lengths) -> KeyValues:
        floors = tuple(max(f, end - self._ring) for f, end in zip(self._floors, ends, strict=True))
        if self._holds_past_of(self._lengths, floors):
            self._write(new, chunk, ends, floors)
            return self._view(ends)
        keys = KeyValues.cat([*self._past(chunk), new])
        self._write(new, chunk, ends, floors)
        return keys

    def _holds_past_of(self, lengths: Lengths, floors: Lengths) -> bool:
        """Whether tokens from `floors` on, and pinned ones, are all that queries from `lengths` on see."""
        needs = (max(self.sinks, length - self.reach) for length in lengths)
        return all(floor <= need for floor, need in zip(floors, needs, strict=True))

    def _view(self, ends: Lengths) -> KeyValues:
        pinned = max(self._pinned, default=0)
        used = self.sinks + self._ring + pinned if pinned else self._slots_for(max(ends, default=0))
        alike = len(set(zip(ends, self._floors, strict=True))) == 1 and not pinned
        in_order = alike and self._floors[0] <= self.sinks
        return self._buffer.view(0, used, alike=alike, start=0 if in_order else None)

    def _past(self, chunk: Chunk) -> list[KeyValues]:
        """What queries after the held tokens may see; in order where all rows agree."""
        own, length = self._buffer, max(self._lengths, default=0)
        if length == 0:
            return []
        if chunk.start is None or any(self._pinned):
            return [self._view(self._lengths)]
        spans = [(0, min(self.sinks, length)), (max(self.sinks, length - self.reach), length)]
        return [
            own.view(slot, count, alike=True, start=index)
            for begin, end in spans
            for slot, index, count in self._runs(begin, end)
        ]

    def _runs(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(slot, index, count) of the runs of neighbouring slots that hold the indices begin..end-1."""
        while begin < end:
            if begin < self.sinks:
                slot, room = begin, self.sinks - begin
            else:
                at = (begin - self.sinks) % self._ring
                slot, room = self.sinks + at, self._ring - at
            count = min(room, end - begin)
            yield slot, begin, count
            begin += count

    def _write(self, new: KeyValues, chunk: Chunk, ends: Lengths, floors: Lengths) -> None:
        own, limit = self._buffer, self.sinks + self._ring
        longest = max(ends, default=0)
        if own.slots < min(longest, limit):
            own.grow(min(limit, max(longest, 2 * own.slots)))
        if chunk.start is None or (self.globals and chunk.any_global):
            self._write_rows(own, new, chunk, ends)
        else:
            start, end = chunk.start, longest
            for begin, stop in (
                (start, min(end, self.sinks)),
                (max(start, self.sinks, end - self._ring), end),
            ):
                for slot, index, count in self._runs(begin, stop):
                    own.write_run(slot, new, index - start, count)
        self._floors = floors

    def _write_rows(self, own: Buffer, new: KeyValues, chunk: Chunk, ends: Lengths) -> None:
        batch, device = len(ends), new.k.device
        rows, columns, index = chunk.places(batch)
        slots = torch.where(index < self.sinks, index, self.sinks + (index - self.sinks) % self._ring)
        last = torch.tensor(ends, dtype=torch.int64, device=device)
        keep = (index < self.sinks) | (index >= last[rows] - self._ring)
        if self.globals and chunk.any_global:
            index_BT = chunk.index.expand(batch, -1)
            pin_BT = new.tokens.globals & (index_BT >= self.sinks)
            before = torch.tensor(self._pinned, dtype=torch.int64, device=device).unsqueeze(1)
            place_BT = before + pin_BT.long().cumsum(1) - 1
            self._pinned = tuple((before[:, 0] + pin_BT.sum(1)).tolist())
            ring_end, most = self.sinks + self._ring, max(self._pinned)
            if own.slots < ring_end + most:
                own.grow(ring_end + max(most, 2 * (own.slots - ring_end)))
            pinned = pin_BT.expand(batch, -1)[rows, columns]
            slots = torch.where(pinned, ring_end + place_BT[rows, columns], slots)
            keep = keep | pinned
        own.write_at(rows[keep], slots[keep], new, columns[keep])

    # -- forgetting and copying ------------------------------------------------------------------------

    def _may_trim(self, ends: Lengths) -> None:
        for b, (end, floor) in enumerate(zip(ends, self._floors, strict=True)):
            if end > self.sinks and not self._holds_past_of((end,), (floor,)):
                length = self._lengths[b]
                rest = f"all but the first {self.sinks}" if self.sinks else "all of them"
                raise CacheError(
                    f"Cache.trim: row {b} has seen {length} tokens and can forget at most "
                    f"{length - floor - self.reach} of them (or {rest}), not "
                    f"{length - end}: this ring (reach {self.reach}, slack {self.slack}) has overwritten "
                    "keys that the tokens before them need; make the cache with "
                    f"slack={length - end}, or fork() it before what may be taken back"
                )

    def _trimmed(self) -> None:
        # A row cut back to its sinks, or to nothing, has lost nothing.
        self._floors = tuple(
            0 if end <= self.sinks else floor for end, floor in zip(self._lengths, self._floors, strict=True)
        )
        if any(self._pinned):
            at = self.sinks + self._ring
            self._pinned = tuple((self._buffer.index[:, at:] >= 0).sum(1).tolist())

    def _reordered(self, rows: list[int]) -> None:
        self._floors = tuple(self._floors[r] for r in rows)
        self._pinned = tuple(self._pinned[r] for r in rows)
