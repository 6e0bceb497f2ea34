"""The paged keys and values that a decoding step attends to (see `headway.models.decode_step`).

Legend: R rows, S slots of the longest sequence.
"""

import ctypes
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from headway.attention.backends.native import kernels
from headway.cache import PAGE, PagedLayer, PageTable
from headway.models.lowering import Attends
from headway.native import interface as c
from headway.native.linear import MOST_ROWS
from headway.native.loader import threads
from headway.native.plan_rows import plan_rows


class PagedPast:
    """An attention call in which every row is one query and keys are in the pages of its sequence or source; layers
    with one pattern and one page class share it. New keys and values are written to `slots`, int64 [R].

    Pages are numbered by their tokens, so the keys that a row sees follow from its query's token index: `plan_rows`
    finds the blocks. `_order` [R, S] maps each key of a row to its slot; a row is rewritten if its sequence's pages
    have changed. `_alike` [R] is the number of leading keys that a row shares with the previous row: they are read
    once for both, unless results must be `exact`.
    """

    def __init__(self, attends: Attends, layer: PagedLayer, exact: bool = False) -> None:
        self.of, self.exact = layer.of, exact
        self.slots = torch.zeros(MOST_ROWS, dtype=torch.int64)
        self._layers: list[tuple[PagedLayer, c.HeadsStruct, c.OpStruct]] = []
        self._tensors: list[tuple[int, int]] = []
        self._rows: list[tuple[PageTable, int]] = []
        self._queries = torch.zeros(MOST_ROWS, 1, dtype=torch.int32)
        self._template = kernels.Arguments(attends.call, 0)  # the constant arguments, kept alive
        self.call = call = self._template.struct
        q, out = attends.q, attends.out
        call.kv_type, call.lse = c.TYPES[layer.dtype], attends.lse.data_ptr()
        call.q = c.TensorStruct(q.data_ptr(), q.stride(0), call.dim, q.stride(0))
        call.out = c.TensorStruct(out.data_ptr(), out.stride(0), call.dim_v, out.stride(0))
        self._room(1, 8)

    def bind(self, attends: Attends, layer: PagedLayer, op: c.OpStruct) -> None:
        """Makes an operation attend to a layer's pages, and write its new keys and values to them."""
        op.of, attends.heads.slots = ctypes.addressof(self.call), self.slots.data_ptr()
        self._layers.append((layer, attends.heads, op))

    def place(self, tables: Sequence[PageTable], queries: Tensor) -> None:
        """Sets each row's sequence, and the token index of its query in it, which determine the keys that it sees."""
        count = len(tables)
        self._queries[:count, 0] = queries
        self._fit(count, max(len(table.pages[self.of]) for table in tables))
        states = [(table, table.version) for table in tables]
        if self._rows[:count] != states:
            self._write(states)
        tensors = [(t.data_ptr(), t.stride(1)) for layer, *_ in self._layers for t in layer.tensors]
        if tensors != self._tensors:
            self._move()
            self._tensors = tensors
        call = self.call
        call.threads = threads()
        call.batch = call.plan.rows = count
        at, room = self._queries.data_ptr(), len(self._begin)
        plan_rows(call.program, call.instructions, at, count, self._runs, room)

    def _write(self, states: Sequence[tuple[PageTable, int]]) -> None:
        """Rewrites the rows whose sequence, or its pages (`PageTable.version`), have changed, and the number of
        keys that they share with the previous row."""
        changed = [a != b for a, b in zip_longest(self._rows, states)]
        for r, (table, _) in enumerate(states):
            pages = table.pages[self.of]
            if changed[r]:
                first = torch.tensor([page or 0 for page in pages], dtype=torch.int32).unsqueeze(1) * PAGE
                slots = (first + torch.arange(PAGE, dtype=torch.int32)).flatten()
                self._order[r, : len(slots)] = slots
            if r and (changed[r - 1] or changed[r]):
                self._alike[r] = _alike(states[r - 1][0].pages[self.of], pages) * PAGE
        self._rows = list(states)

    def _move(self) -> None:
        """Points the operations to their layers' pages, the only thing in which operations of one class differ."""
        call = self.call
        for layer, heads, op in self._layers:
            k, v, *scales = layer.tensors
            for name, t in zip(("k", "v", "k_scale", "v_scale"), layer.tensors, strict=False):
                setattr(op, name, t.data_ptr())
            heads.k_cache, heads.v_cache = c.TensorStruct.of(k), c.TensorStruct.of(v)
            if scales:
                heads.k_scale, heads.v_scale = (scale.data_ptr() for scale in scales)
                heads.scale_head = call.scale_head = scales[0].stride(1)
            call.k, call.v = (c.TensorStruct(t.data_ptr(), 0, t.stride(1), t.stride(2)) for t in (k, v))

    def _fit(self, rows: int, pages: int) -> None:
        """Ensures room for this many rows and pages per row, doubling what is too small."""
        most, size = self._order.shape
        if rows > most or pages * PAGE > size:
            fewer, shorter = rows <= most, pages * PAGE <= size
            self._room(most if fewer else min(2 * rows, MOST_ROWS), size // PAGE if shorter else 2 * pages)

    def _room(self, rows: int, pages: int) -> None:
        """Allocates arrays for this many rows and pages per row."""
        size, call = pages * PAGE, self.call
        self._index = torch.arange(size, dtype=torch.int32).expand(rows, -1).contiguous()
        self._order = torch.zeros_like(self._index)
        self._first = torch.zeros(rows + 1, dtype=torch.int32)
        self._begin, self._end = (torch.zeros(rows * pages, dtype=torch.int32) for _ in range(2))
        self._full = torch.zeros(rows * pages, dtype=torch.uint8)
        self._alike = torch.zeros(rows, dtype=torch.int32)
        self._rows = []
        index, order = self._index.data_ptr(), self._order.data_ptr()
        call.queries = c.TokensStruct(self._queries.data_ptr(), None, None, None, rows, 1)
        call.keys = c.TokensStruct(index, None, None, order, rows, size)
        first, begin, end, full = self._first, self._begin, self._end, self._full
        self._runs = first.data_ptr(), begin.data_ptr(), end.data_ptr(), full.data_ptr()
        call.plan = c.PlanStruct(*self._runs, rows, 1, c.TILE, None if self.exact else self._alike.data_ptr())


def _alike(before: Sequence[int | None], pages: Sequence[int | None]) -> int:
    """Returns how many leading pages two sequences share: (4, 7, 2) and (4, 7, 5) share 2."""
    differ = (i for i, (a, b) in enumerate(zip(before, pages, strict=False)) if a != b)
    return len(pages) if before is pages else next(differ, min(len(before), len(pages)))
