"""Which slot holds which token: kept once for all layers whose patterns retain the same tokens.

Legend: B rows, S slots, T slots of a chunk, N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.cache.policy import Run, SlotPolicy
from headway.cache.sequences import Chunk, Documents, SequenceLengths, name
from headway.errors import CacheError
from headway.tokens import Tokens

Places = tuple[Tensor | slice, Tensor | slice]
"""(rows, slots) as an index of a tensor [B, S, ...]."""
Writes = Sequence[tuple[Places, Places | None]]
"""(to, from): tokens at the places `from` [B, T] of a chunk, None: all, go to the places `to` [B, S]."""

FIELDS = {"index": "index", "document": "documents", "is_global": "globals", "position": "positions"}
"""What is kept of a token: fields of `Tokens`, and their values where a field is None."""


@dataclass(frozen=True, eq=False)
class Placement:
    """What every layer of the table does with a chunk.

    Attributes:
        chunk: the chunk.
        past: None: the chunk is stored first, and its queries attend over the first slots where they lie.
            Else the slots that they see of the past; a copy of those is put before the chunk, since storing the chunk
            overwrites some of them.
        tokens: of what is attended over.
        writes: where the chunk is stored.
    """

    chunk: Chunk
    past: Sequence[Run] | None
    tokens: Tokens
    writes: Writes


class SlotTable:
    """The token of every slot.

    Tensors are made outside inference mode, so that a cache filled there can be continued elsewhere.

    Args:
        policy: which tokens are kept, and in which slots.
        lengths: of the sequences; shared with the other tables of a decoder.

    Attributes:
        tokens: of the slots, [B, S]; an empty slot has index -1. `document`, `is_global` and `position` are there from
            the first chunk on that has them, and do not change once a token is stored.
    """

    def __init__(self, policy: SlotPolicy, lengths: SequenceLengths) -> None:
        self.policy, self.lengths = policy, lengths
        batch = len(lengths.rows)
        with torch.inference_mode(False):
            self.tokens = Tokens(torch.full((batch, 0), -1, dtype=torch.int64, device=lengths.device))
        # Of the tokens that are not pinned, a sequence holds those with floor <= index < length; 0 unless said.
        self._floors: list[Documents] = [{} for _ in range(batch)]
        self._formula = policy.has_formula  # whether all rows follow it now
        self._span = 0  # slots in use
        self._placed: Placement | None = None

    # -- taking a chunk --------------------------------------------------------------------------------

    def place(self, chunk: Chunk) -> Placement:
        """Decides where the chunk goes, which `lengths` has accepted, and what its queries attend over. Every layer
        asks; the first one has it decided."""
        if self._placed is None or self._placed.chunk is not chunk:
            pins = self.policy.retention.globals and chunk.any_global
            self._formula = self._formula and chunk.tokens.document is None and not pins
            start = chunk.tokens.start if self._formula else None
            with torch.inference_mode(False):
                new = chunk.tokens if start is not None else chunk.tokens.expand(len(self._floors))
                self._describe(new)
                past = None if self._raise_floors(chunk) else self._past(start)
                seen = [self._view(run, in_order=start is not None) for run in past or ()]
                before = Tokens.cat([*seen, chunk.tokens])
                writes = self._by_token(new) if start is None else self._by_formula(new.count, start)
                self._write(new, writes)
                self._placed = Placement(chunk, past, self._everything() if past is None else before, writes)
        return self._placed

    def _raise_floors(self, chunk: Chunk) -> bool:
        """The floors after the chunk; True where nothing is forgotten that its own queries may see."""
        in_place = True
        for floors, spans in zip(self._floors, chunk.spans, strict=True):
            for document, (begin, end) in spans.items():
                floor = max(floors.get(document, 0), self.policy.floor(end))
                in_place = in_place and floor <= self.policy.seen_from(begin)
                if floor:
                    floors[document] = floor
        return in_place

    def _past(self, start: int | None) -> Sequence[Run]:
        """What the next queries may see: where all go on from `start`, in order."""
        if start is None:
            return [Run(0, self._span, 0)] if self._span else []
        spans = (0, min(self.policy.retention.sinks, start)), (self.policy.seen_from(start), start)
        return [run for span in spans for run in self.policy.runs(*span)]

    def _by_formula(self, count: int, start: int) -> Writes:
        """Where `count` tokens go when every row goes on from `start`."""
        end, sinks, rows = start + count, self.policy.retention.sinks, slice(None)
        self._span = self.policy.most(end)
        self._grow_to(self._span)
        spans = (start, min(end, sinks)), (max(start, sinks, self.policy.floor(end)), end)
        writes: list[tuple[Places, Places | None]] = []
        for slot, length, begin in (run for span in spans for run in self.policy.runs(*span)):
            taken = None if length == count else (rows, slice(begin - start, begin - start + length))
            writes.append(((rows, slice(slot, slot + length)), taken))
        return writes

    def _by_token(self, new: Tokens) -> Writes:
        """Where tokens go, one by one, when rows go on differently."""
        keep_BT = new.valid & self._is_kept(new)
        row_N, column_N = keep_BT.nonzero(as_tuple=True)
        some = new.map(lambda t: t[row_N, column_N].unsqueeze(0))
        if self._formula:
            slot_N = self.policy.slot_of(some.index[0])
        else:
            self.tokens.index.masked_fill_(~self._is_kept(self.tokens), -1)
            slot_N = self.policy.place(self.tokens, row_N, some)
        last = int(slot_N.max()) + 1 if len(slot_N) else 0
        self._grow_to(last)
        self._span = max(self._span, last)
        if len(row_N) == keep_BT.numel():
            return [((row_N.view_as(keep_BT), slot_N.view_as(keep_BT)), None)]
        return [((row_N, slot_N), (row_N, column_N))]

    def _is_kept(self, tokens: Tokens) -> Tensor:
        """Which of these tokens [B, N] are not to be forgotten: bool."""
        if self.policy.retention.reach is None:
            return tokens.valid
        kept = tokens.index >= per_slot(self._floors, tokens)
        kept = kept | (tokens.index < self.policy.retention.sinks)
        return kept | tokens.globals if self.policy.retention.globals else kept

    def _describe(self, new: Tokens) -> None:
        """Adds the fields that the chunk has and the table has not."""
        own = self.tokens
        pairs = (own.document, new.document), (own.is_global, new.is_global), (own.position, new.position)
        if any(have is None and given is not None for have, given in pairs):
            self.tokens = Tokens.cat([own, new.slice(0, 0)])

    def _write(self, new: Tokens, writes: Writes) -> None:
        for field, value in FIELDS.items():
            own: Tensor | None = getattr(self.tokens, field)
            if own is not None:
                given = getattr(new, value)
                for to, taken in writes:
                    own[to] = given if taken is None else given[taken]

    def _grow_to(self, slots: int) -> None:
        """At least so many slots: twice as many as before, but no more than the bound."""
        if slots > self.tokens.count:
            bound = self.bound
            self.grow(
                max(slots, 2 * self.tokens.count if bound is None else min(2 * self.tokens.count, bound))
            )

    def grow(self, slots: int) -> None:
        """At least so many slots; the new ones are empty."""
        if slots > self.tokens.count:
            with torch.inference_mode(False):
                empty = self.tokens.index.new_full((len(self._floors), slots - self.tokens.count), -1)
                self.tokens = Tokens.cat([self.tokens, Tokens(empty)])

    # -- what is there ---------------------------------------------------------------------------------

    def _view(self, run: Run, *, in_order: bool, alike: bool = False) -> Tokens:
        """The tokens of neighbouring slots, as views. `in_order`: every row holds begin, begin + 1, ...; `alike`: all
        rows hold the same indices. One row then stands for them."""
        own, at = self.tokens, slice(run.slot, run.slot + run.length)
        more = [None if t is None else t[:, at] for t in (own.document, own.is_global, own.position)]
        index = own.index[: 1 if alike or in_order else None, at]
        return Tokens(index, more[0], more[1], more[2], run.begin if in_order else None)

    def _everything(self) -> Tokens:
        """The slots in use; one row where all rows are alike, and with `start` where they are in order."""
        rows, floors = self.lengths.rows, self._floors
        alike = all(row == rows[0] for row in rows) and all(row == floors[0] for row in floors)
        if not (self._formula and rows and alike):
            return self._view(Run(0, self._span, 0), in_order=False)
        run = Run(0, self.policy.most(rows[0].get(0, 0)), 0)
        return self._view(run, in_order=floors[0].get(0, 0) <= self.policy.retention.sinks, alike=True)

    @property
    def bound(self) -> int | None:
        """sinks + reach + 1 + slack for each document, and a slot for each global token that is pinned, of the row for
        which this is most; None: rows grow without bound."""
        recent, sinks = self.policy.recent, self.policy.retention.sinks
        if self.policy.retention.reach is None:
            return None
        documents = torch.tensor([max(1, len(row)) for row in self.lengths.rows])
        most = documents * (sinks + recent)
        if self.policy.retention.globals and self.tokens.is_global is not None:
            most += (self.tokens.is_global & (self.tokens.index >= sinks)).sum(1).cpu()
        return max(most.tolist(), default=sinks + recent)

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
        index = self.tokens.index
        with torch.inference_mode(False):
            index.masked_fill_(index >= per_slot(ends, self.tokens), -1)
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
            self.tokens = self.tokens.map(lambda t: t.index_select(0, rows))
        self._floors = [dict(self._floors[r]) for r in rows.tolist()]
        self._look_again()

    def _look_again(self) -> None:
        """Finds the slots in use, and whether rows follow the policy's formula again."""
        held, slot = self.tokens.valid, torch.arange(self.tokens.count, device=self.lengths.device)
        self._placed, self._span = None, int(((slot + 1) * held).max()) if held.numel() else 0
        if not bool((self.tokens.documents * held).any()):
            self.tokens = replace(self.tokens, document=None)
        free = self.tokens.document is None and self.policy.has_formula
        if free and not (self.policy.retention.globals and bool((self.tokens.globals & held).any())):
            self._formula = bool((~held | (self.policy.slot_of(self.tokens.index) == slot)).all())


def per_slot(values: Sequence[Mapping[int, int]], tokens: Tokens) -> Tensor:
    """values[b][document] of each token of row b, 0 where there is none: int64 [B, N], or [B, 1] where no token has a
    document.

    For values ({0: 4}, {0: 1, 7: 2}) and documents [[0, 0], [7, 3]]: [[4, 4], [2, 0]].
    """
    known = [0] if tokens.document is None else sorted({0, *(document for row in values for document in row)})
    value = [[row.get(document, 0) for document in known] for row in values]
    value_BK = torch.tensor(value, dtype=torch.int64, device=tokens.device).reshape(-1, len(known))
    if tokens.document is None:
        return value_BK
    known_K = torch.tensor(known, device=tokens.device)
    place_BN = torch.searchsorted(known_K, tokens.document.contiguous()).clamp_max(len(known) - 1)
    return torch.where(known_K[place_BN] == tokens.document, value_BK.gather(1, place_BN), 0)
