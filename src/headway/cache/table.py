"""Which slot holds which token: kept once for all layers whose patterns retain the same tokens.

Legend: B rows, S slots, T slots of a chunk, N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from headway.cache.chunk import Chunk
from headway.cache.lengths import Documents, SequenceLengths, name
from headway.cache.policy import Run, SlotPolicy
from headway.errors import CacheError
from headway.tokens import Tokens

Columns = tuple[int, int, int]
"""(slot, column, count): the chunk's columns column, column + 1, ... go to the slots slot, slot + 1, ..."""


@dataclass(frozen=True, eq=False)
class Placement:
    """What every layer of the table does with a chunk.

    Attributes:
        chunk: the chunk.
        capacity: slots that a layer must have.
        past: None: the chunk is stored first, and its queries attend over the slots 0..span-1 where they lie.
            Else (slot, count) of what they see of the past; a copy of it is put before the chunk, since storing
            the chunk overwrites some of it.
        span: slots in use.
        tokens: of what is attended over.
        runs: where each column of the chunk goes, in every row; None: see `at`.
        at: (row, slot, column) of each token that is stored, each int64 [N]; column None: all, row by row.
    """

    chunk: Chunk
    capacity: int
    past: tuple[tuple[int, int], ...] | None
    span: int
    tokens: Tokens
    runs: tuple[Columns, ...] | None
    at: tuple[Tensor, Tensor, Tensor | None] | None


class SlotTable:
    """The token of every slot: index, document, is_global and position, each [B, S]; an empty slot has index -1.

    `document`, `is_global` and `position` exist from the first chunk on that has them, and are frozen when a token is
    stored. Tensors are made outside inference mode, so that a cache filled there can be continued elsewhere.

    Args:
        policy: which tokens are kept, and in which slots.
        lengths: of the sequences; shared with the other tables of a decoder.
    """

    def __init__(self, policy: SlotPolicy, lengths: SequenceLengths) -> None:
        self.policy, self.lengths = policy, lengths
        batch = len(lengths.rows)
        with torch.inference_mode(False):
            self.index = torch.full((batch, 0), -1, dtype=torch.int64, device=lengths.device)
        self.document: Tensor | None = None
        self.is_global: Tensor | None = None
        self.position: Tensor | None = None
        # Of the tokens that are not pinned, a sequence holds those with floor <= index < length; 0 unless said.
        self._floors: list[Documents] = [{} for _ in range(batch)]
        self._formula = policy.runs(0, 0) is not None  # whether all rows follow the policy's formula
        self._span = 0
        self._placed: Placement | None = None

    # -- taking a chunk --------------------------------------------------------------------------------

    def place(self, chunk: Chunk) -> Placement:
        """Decides where the chunk goes, which `lengths` has accepted, and what its queries attend over. Every layer
        asks; the first one has it decided."""
        if self._placed is None or self._placed.chunk is not chunk:
            pins = self.policy.retention.globals and chunk.any_global
            self._formula = self._formula and not chunk.packed and not pins
            in_place = self._raise_floors(chunk)
            with torch.inference_mode(False):
                if self._formula and chunk.tokens.start is not None:
                    self._placed = self._place_runs(chunk, chunk.tokens.start, in_place)
                else:
                    self._placed = self._place_tokens(chunk, in_place)
        return self._placed

    def _raise_floors(self, chunk: Chunk) -> bool:
        """The floors after the chunk; True where nothing is forgotten that its own queries may see."""
        if self.policy.recent is None:
            return True
        in_place, at_least = True, self.policy.seen_from
        for floors, spans in zip(self._floors, chunk.spans, strict=True):
            for document, (begin, end) in spans.items():
                floor = max(floors.get(document, 0), self.policy.floor(end))
                in_place = in_place and floor <= at_least(begin)
                if floor:
                    floors[document] = floor
        return in_place

    def _place_runs(self, chunk: Chunk, start: int, in_place: bool) -> Placement:
        """Where every row goes on by the same indices, and the policy's formula says where."""
        policy, end, sinks = self.policy, start + chunk.tokens.count, self.policy.retention.sinks
        span = policy.most(end)
        self._grow_to(span)
        past = (
            ()
            if in_place
            else (*self._runs(0, min(sinks, start)), *self._runs(policy.seen_from(start), start))
        )
        before = [self._view(run.slot, run.count, rows=1, start=run.index) for run in past]
        tokens = None if in_place else Tokens.cat([*before, chunk.tokens])
        kept = (*self._runs(start, min(end, sinks)), *self._runs(max(start, sinks, policy.floor(end)), end))
        runs = tuple((run.slot, run.index - start, run.count) for run in kept)
        for slot, column, count in runs:
            some = chunk.tokens if count == chunk.tokens.count else chunk.tokens.slice(column, column + count)
            self._write((slice(None), slice(slot, slot + count)), some)
        self._span = span
        where = None if in_place else tuple((run.slot, run.count) for run in past)
        return Placement(chunk, self.slots, where, span, tokens or self._everything(), runs, None)

    def _runs(self, begin: int, end: int) -> Sequence[Run]:
        return (self.policy.runs(begin, end) or ()) if begin < end else ()

    def _place_tokens(self, chunk: Chunk, in_place: bool) -> Placement:
        """Where rows go on differently: token by token."""
        past = () if in_place or not self._span else ((0, self._span),)
        before = [self._view(slot, count) for slot, count in past]
        tokens = None if in_place else Tokens.cat([*before, chunk.tokens])
        new = chunk.tokens.expand(len(self.index))
        if chunk.packed and self.document is None:
            self.document = torch.zeros_like(self.index)
        keep_BT = new.valid & self._is_kept(new)
        row_N, column_N = keep_BT.nonzero(as_tuple=True)
        some = new.map(lambda t: t[row_N, column_N].unsqueeze(0))
        if self._formula:
            slot_N = self.policy.slot_of(some.index[0])
        else:
            held = self._view(0, self.slots)
            self.index.masked_fill_(~self._is_kept(held), -1)
            slot_N = self.policy.place(held, row_N, some)
        last = int(slot_N.max()) + 1 if len(slot_N) else 0
        self._grow_to(last)
        self._write((row_N, slot_N), some)
        self._span = max(self._span, last)
        where = None if in_place else past
        at = (row_N, slot_N, None if len(row_N) == keep_BT.numel() else column_N)
        return Placement(chunk, self.slots, where, self._span, tokens or self._everything(), None, at)

    def _is_kept(self, tokens: Tokens) -> Tensor:
        """Which of these tokens [B, N] are not to be forgotten: bool."""
        if self.policy.recent is None:
            return tokens.valid
        kept = tokens.index >= per_slot(self._floors, tokens)
        kept = kept | (tokens.index < self.policy.retention.sinks)
        return kept | tokens.globals if self.policy.retention.globals else kept

    def _write(self, at: tuple[Tensor | slice, Tensor | slice], new: Tokens) -> None:
        if new.is_global is not None and self.is_global is None:
            self.is_global = torch.zeros_like(self.index, dtype=torch.bool)
        if new.position is not None and self.position is None:
            self.position = self.index.clone()
        self.index[at] = new.index
        if self.document is not None:
            self.document[at] = new.documents
        if self.is_global is not None:
            self.is_global[at] = new.globals
        if self.position is not None:
            self.position[at] = new.positions

    def _grow_to(self, slots: int) -> None:
        """At least so many slots: twice as many as before, but no more than the bound."""
        if slots > self.slots:
            bound = self.bound
            self.grow(max(slots, 2 * self.slots if bound is None else min(2 * self.slots, bound)))

    def grow(self, slots: int) -> None:
        """At least so many slots; the new ones are empty."""
        more = slots - self.slots
        if more <= 0:
            return
        with torch.inference_mode(False):
            for field, value in (("index", -1), ("document", 0), ("is_global", False), ("position", -1)):
                old: Tensor | None = getattr(self, field)
                if old is not None:
                    setattr(self, field, pad(old, (0, more), value=value))

    # -- what is there ---------------------------------------------------------------------------------

    def _view(self, slot: int, count: int, rows: int | None = None, start: int | None = None) -> Tokens:
        """The tokens of neighbouring slots, as views. `rows=1`: all rows hold the same indices, so that one row stands
        for them; `start`: they are known to be start, start + 1, ..."""
        at = slice(slot, slot + count)
        document, is_global, position = (
            None if t is None else t[:, at] for t in (self.document, self.is_global, self.position)
        )
        return Tokens(self.index[:rows, at], document, is_global, position, start)

    def _everything(self) -> Tokens:
        """The slots in use; one row where all rows are alike, and with `start` where they are in order."""
        rows, floors = self.lengths.rows, self._floors
        alike = self._formula and all(r == rows[0] for r in rows) and all(f == floors[0] for f in floors)
        if not alike or not rows:
            return self._view(0, self._span)
        in_order = floors[0].get(0, 0) <= self.policy.retention.sinks
        return self._view(0, self.policy.most(rows[0].get(0, 0)), 1, 0 if in_order else None)

    @property
    def slots(self) -> int:
        """Slots of a row."""
        return self.index.shape[1]

    @property
    def held(self) -> int:
        """The most slots that hold a token now, over the rows."""
        held = (self.index >= 0).sum(1)
        return int(held.max()) if len(held) else 0

    @property
    def bound(self) -> int | None:
        """sinks + reach + 1 + slack for each document, and a slot for each global token that is pinned, of the row for
        which this is most; None: rows grow without bound."""
        recent, sinks = self.policy.recent, self.policy.retention.sinks
        if recent is None:
            return None
        pinned = [0] * len(self.index)
        if self.policy.retention.globals and self.is_global is not None:
            pinned = (self.is_global & (self.index >= sinks)).sum(1).tolist()
        each = (
            max(1, len(row)) * (sinks + recent) + n for row, n in zip(self.lengths.rows, pinned, strict=True)
        )
        return max(each, default=sinks + recent)

    # -- forgetting and choosing rows ------------------------------------------------------------------

    def check_trim(self, ends: Sequence[Documents]) -> None:
        """Raises CacheError where a sequence cannot go back to the length ends[b][document]."""
        sinks, reach = self.policy.retention.sinks, self.policy.retention.reach
        if reach is None:
            return
        for b, (row, floors) in enumerate(zip(ends, self._floors, strict=True)):
            for document, end in row.items():
                floor = floors.get(document, 0)
                if end <= sinks or floor <= self.policy.seen_from(end):
                    continue
                length = self.lengths.rows[b][document]
                rest = f"all but the first {sinks}" if sinks else "all of them"
                raise CacheError(
                    f"Cache.trim: {name(b, document)} has seen {length} tokens and can forget at most "
                    f"{length - floor - reach} of them (or {rest}), not "
                    f"{length - end}: this {self.policy.name} (reach {reach}, slack {self.policy.slack}) has "
                    "overwritten keys that the tokens before them need; make the cache with "
                    f"slack={length - end}, or fork() it before what may be taken back"
                )

    def trim(self, ends: Sequence[Documents]) -> None:
        """Forgets tokens with index >= ends[b][document], after `check_trim`."""
        with torch.inference_mode(False):
            self.index.masked_fill_(self.index >= per_slot(ends, self._view(0, self.slots)), -1)
        # A sequence cut back to its sinks, or to nothing, has lost nothing.
        sinks = self.policy.retention.sinks
        self._floors = [
            {document: floor for document, floor in floors.items() if row.get(document, 0) > sinks}
            for row, floors in zip(ends, self._floors, strict=True)
        ]
        self._look_again()

    def select_rows(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was."""
        with torch.inference_mode(False):
            for field in ("index", "document", "is_global", "position"):
                old: Tensor | None = getattr(self, field)
                setattr(self, field, None if old is None else old.index_select(0, rows))
        self._floors = [dict(self._floors[r]) for r in rows.tolist()]
        self._look_again()

    def _look_again(self) -> None:
        """Finds the slots in use, and whether rows follow the policy's formula again."""
        self._placed = None
        held = self.index >= 0
        slot = torch.arange(self.slots, device=held.device)
        self._span = int(((slot + 1) * held).max()) if held.numel() else 0
        if self.document is not None and not bool((self.document * held).any()):
            self.document = None
        pinned = (
            self.policy.retention.globals
            and self.is_global is not None
            and bool((self.is_global & held).any())
        )
        if self.policy.runs(0, 0) is not None and self.document is None and not pinned:
            self._formula = bool((~held | (self.policy.slot_of(self.index) == slot)).all())


def per_slot(values: Sequence[Mapping[int, int]], tokens: Tokens) -> Tensor:
    """values[b][document] of each token of row b, 0 where there is none: int64 [B, N], or [B, 1] where no token has a
    document.

    For values ({0: 4}, {0: 1, 7: 2}) and documents [[0, 0], [7, 3]]: [[4, 4], [2, 0]].
    """
    device = tokens.device
    if tokens.document is None:
        return torch.tensor([[row.get(0, 0)] for row in values], dtype=torch.int64, device=device).reshape(
            -1, 1
        )
    known = sorted({document for row in values for document in row}) or [0]
    value_BK = torch.tensor(
        [[row.get(d, 0) for d in known] for row in values], dtype=torch.int64, device=device
    )
    known_K = torch.tensor(known, device=device)
    place_BN = torch.searchsorted(known_K, tokens.document.contiguous()).clamp_max(len(known) - 1)
    value_BN = value_BK.reshape(len(values), -1).gather(1, place_BN)
    return torch.where(known_K[place_BN] == tokens.document, value_BN, 0)
