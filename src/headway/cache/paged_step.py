"""One step over sequences in pages, shared by all layers of a model: its tokens, their slots, and the keys it attends
to.

Legend: T tokens of the step, N keys, R sequences of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headway.attention import KeyValues
from headway.cache.page_table import PAGE, PageClass, PageTable
from headway.tokens import Tokens

Chunk = tuple[PageTable, Sequence[int]]
"""A sequence and the ids that it continues with."""


@dataclass(frozen=True, eq=False)
class Places:
    """Keys of the sequences of a step: their tokens [1, N], and the slots [1, N] that they lie in, int32."""

    tokens: Tokens
    slots: Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """The tokens of a step, padded to one row per sequence: `at` [R, T'], their indices in the packed row; tokens [R,
    T']; `back` [T], the indices of the packed tokens among all R T'."""

    at: Tensor
    tokens: Tokens
    back: Tensor

    def unpack(self, x: Tensor, dim: int = 1) -> Tensor:
        """Returns x [1, T, ...], or [1, H, T, ...] for dim=2, as rows [R, T', ...] or [R, H, T', ...]."""
        rows: Tensor = x[0].index_select(dim - 1, self.at.flatten()).unflatten(dim - 1, self.at.shape)
        return rows.movedim(dim - 1, 0)

    def pack(self, x: Tensor, dim: int = 1) -> Tensor:
        """Returns rows [R, T', ...], or [R, H, T', ...] for dim=2, as the tokens [1, T, ...] of the packed row."""
        return x.movedim(0, dim - 1).flatten(dim - 1, dim).index_select(dim - 1, self.back).unsqueeze(0)


class PagedStep:
    """One step, shared by all layers."""

    def __init__(self, classes: Sequence[PageClass], device: torch.device, chunks: Sequence[Chunk]) -> None:
        self.classes, self.device, self.tables = classes, device, [table for table, _ in chunks]
        self.counts = [len(ids) for _, ids in chunks]
        self.starts = [len(table) - n for table, n in zip(self.tables, self.counts, strict=True)]
        pairs = [
            (start + i, d)
            for d, (start, n) in enumerate(zip(self.starts, self.counts, strict=True))
            for i in range(n)
        ]
        index, document = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T.to(self.device).unsqueeze(1)
        alone = len(chunks) == 1
        self.tokens = Tokens(
            index,
            None if alone else document,
            marked(self.tables, index, document),
            start=self.starts[0] if alone else None,
        )
        self.is_fresh = not any(self.starts)
        self._places: dict[int, Places] = {}

    @cached_property
    def in_place(self) -> Tensor:
        """The slots [1, T] of the step's own keys in the order in which they are passed: 0, 1, ..."""
        return torch.arange(self.tokens.count, dtype=torch.int32, device=self.device).unsqueeze(0)

    @cached_property
    def writes(self) -> list[Tensor]:
        """The slots [T] to which the tokens are written, for each class; empty for a class of states."""
        return [
            torch.tensor(
                []
                if kind.state
                else [
                    page_of(table, of, i // PAGE) * PAGE + i % PAGE
                    for table, start, n in zip(self.tables, self.starts, self.counts, strict=True)
                    for i in range(start, start + n)
                ],
                dtype=torch.int64,
                device=self.device,
            )
            for of, kind in enumerate(self.classes)
        ]

    @cached_property
    def runs(self) -> list[Tensor | slice]:
        """`writes`, on the CPU with a slice in place of consecutive slots, which is copied eight times as fast."""
        return [_run(slots) if slots.is_cpu else slots for slots in self.writes]

    @cached_property
    def states(self) -> list[Tensor]:
        """The page [R] of each sequence's state, for each class of states; empty for other classes."""
        return [
            torch.tensor([page_of(table, of, 0) for table in self.tables if kind.state], dtype=torch.int64)
            for of, kind in enumerate(self.classes)
        ]

    def places(self, of: int) -> Places:
        """Returns the keys that layers of a class attend to: all that is kept of the sequences, page by page."""
        if of not in self._places:
            self._places[of] = places(self.tables, of, self.device)
        return self._places[of]

    @cached_property
    def rows(self) -> Rows:
        """The tokens of the step, one row per sequence; see `Rows`."""
        # counts [2, 1]: at [[0, 1], [2, 2]], valid [[1, 1], [1, 0]], back [0, 1, 2]
        longest, device = max(self.counts, default=0), self.device
        offset = torch.arange(longest, device=device)
        count, start = (
            torch.tensor(n, dtype=torch.int64, device=device).unsqueeze(1) for n in (self.counts, self.starts)
        )
        at = (count.cumsum(0) - count + offset).clamp_max(sum(self.counts) - 1)
        valid = offset < count
        return Rows(at, Tokens(torch.where(valid, start + offset, -1)), valid.flatten().nonzero()[:, 0])


def _run(slots: Tensor) -> Tensor | slice:
    first, count = int(slots[0]) if len(slots) else 0, len(slots)
    return slice(first, first + count) if torch.equal(slots, torch.arange(first, first + count)) else slots


def places(tables: Sequence[PageTable], of: int, device: torch.device) -> Places:
    """Returns the tokens and slots of the keys that class `of` keeps of sequences, as documents 0, 1, ..."""
    held_pages = [
        (page, number * PAGE, d, len(table))
        for d, table in enumerate(tables)
        for number, page in enumerate(table.pages[of])
        if page is not None
    ]
    with torch.inference_mode(False):  # as in PagedCache.begin
        page, first, document, length = torch.tensor(held_pages, dtype=torch.int64).view(-1, 4).T.unsqueeze(2)
        slot = torch.arange(PAGE)
        index = first + slot
        index = torch.where(index < length, index, -1).view(1, -1).to(device)
        document = document.expand(-1, PAGE).reshape(1, -1).to(device)
        slots = (page * PAGE + slot).view(1, -1).int().to(device)
        is_global = marked(tables, index, document)
    return Places(Tokens(index, document if len(tables) > 1 else None, is_global), slots)


def marked(tables: Sequence[PageTable], index: Tensor, document: Tensor) -> Tensor | None:
    """Returns which tokens of sequences 0, 1, ... are global, bool [1, N]; None if no sequence has global tokens."""
    if not any(table.globals for table in tables):
        return None
    flags = torch.zeros_like(index, dtype=torch.bool)
    for d, table in enumerate(tables):
        flags |= (document == d) & torch.isin(index, index.new_tensor([*table.globals]))
    return flags


def stored_keys(tensors: Sequence[Tensor], places: Places) -> KeyValues:
    """Returns the keys and values at these places, from a layer's tensors."""
    k, v, *scales = tensors
    k_scale, v_scale = scales or (None, None)
    return KeyValues(k, v, places.tokens, k_scale, v_scale, places.slots)


def page_of(table: PageTable, of: int, number: int) -> int:
    page = table.pages[of][number]
    assert page is not None
    return page
