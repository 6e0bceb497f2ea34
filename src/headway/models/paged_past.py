"""What a step of decoding attends to in pages: see `headway.models.decode_step`.

Legend: R rows, S slots of the longest text.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate, zip_longest

import torch
from torch import Tensor

from headway.attention import KeyValues
from headway.attention.backends.native import kernels
from headway.attention.call import validate
from headway.cache import PAGE, PagedLayer, PageTable
from headway.models.lowering import Attends
from headway.native import interface as c
from headway.native.linear import MOST_ROWS
from headway.native.loader import threads
from headway.native.plan_rows import plan_rows
from headway.tokens import Tokens


class PagedCall:
    """A call in which every row is one query, whose keys are in the pages of a text, as layers of one pattern and one
    class of pages share it.

    `_index` [R, S] says which token of its text each key of a row is, -1 where there is none, `_order` [R, S] in which
    slot it lies. Runs of blocks are those of `headway.native.plan_rows`. `_alike` [R] says how many of the first keys
    of a row are those of the row before: they are read once for both, unless results are to be exact."""

    def __init__(self, attends: Attends, dtype: torch.dtype, exact: bool = False) -> None:
        self.attends, self.dtype, self.exact = attends, dtype, exact
        self._layers: list[tuple[PagedLayer, c.OpStruct]] = []
        self._queries = torch.zeros(MOST_ROWS, 1, dtype=torch.int32)
        self._template = self._of_one_key()  # all that does not change, and what it points to
        self.call = self._template.struct
        self._room(1, 8)

    def bind(self, attends: Attends, cache: PagedLayer, op: c.OpStruct) -> None:
        """An operation attends to the pages of a layer."""
        op.of = ctypes.addressof(self.call)
        self._layers.append((cache, op))

    def _bound(self, tensors: Sequence[Tensor], op: c.OpStruct) -> bool:
        """Binds an operation to these pages; False where it is already."""
        places, of_op = [t.data_ptr() for t in tensors], ("k", "v", "k_scale", "v_scale")[: len(tensors)]
        strides = self.call.k.head, self.call.v.head
        if [getattr(op, name) for name in of_op] == places and strides == (
            *(t.stride(1) for t in tensors[:2]),
        ):
            return False
        for name, place in zip(of_op, places, strict=True):
            setattr(op, name, place)
        return True

    def _slots(self, table: PageTable, of: int) -> Tensor:
        """Where the tokens of a text lie, [S]."""
        pages = torch.tensor([page or 0 for page in table.pages[of]], dtype=torch.int32)
        return ((pages * PAGE).unsqueeze(1) + torch.arange(PAGE, dtype=torch.int32)).flatten()

    def _fit(self, rows: int, pages: int) -> None:
        """Makes room for so many rows of texts of so many pages, or twice as many where there is too little."""
        there, size = self._order.shape
        if rows > there or pages * PAGE > size:
            fewer, shorter = rows <= there, pages * PAGE <= size
            self._room(there if fewer else min(2 * rows, MOST_ROWS), size // PAGE if shorter else 2 * pages)

    def _room(self, rows: int, pages: int) -> None:
        """Room for so many rows of texts of so many pages."""
        self._index = torch.arange(pages * PAGE, dtype=torch.int32).expand(rows, -1).contiguous()
        self._order = torch.zeros_like(self._index)
        self._first = torch.zeros(rows + 1, dtype=torch.int32)
        self._begin, self._end = (torch.zeros(rows * pages, dtype=torch.int32) for _ in range(2))
        self._full = torch.zeros(rows * pages, dtype=torch.uint8)
        self._alike = torch.zeros(rows, dtype=torch.int32)

    @property
    def _runs(self) -> tuple[int, int, int, int]:
        first, begin, end, full = self._first, self._begin, self._end, self._full
        return first.data_ptr(), begin.data_ptr(), end.data_ptr(), full.data_ptr()

    def _of_one_key(self) -> kernels.Arguments:
        """The call of one query and one key."""
        layer, mixer, scores, q, *_ = self.attends
        query = q[:1].view(1, 1, layer.heads.query_heads, -1).transpose(1, 2)
        k, v = (q.new_zeros(1, layer.heads.kv_heads, 1, size) for size in (layer.head_dim, layer.value_dim))
        steps, tokens = tuple(step for some in scores for step in some()), Tokens.range(1)
        keys = KeyValues(k, v, tokens)
        keys = keys.quantized() if self.dtype == torch.int8 else keys
        return kernels.Arguments(
            validate(query, tokens, [keys], mixer.pattern, None, steps, mixer.scale, 0.0, None), 0
        )

    def _describe(self, count: int, k: Tensor, v: Tensor, *scales: Tensor) -> None:
        """The rows in use, and the pages of the first layer; those of the others differ in where they lie alone."""
        call = self.call
        layer, _, _, q, out, lse, *_ = self.attends
        call.threads, call.batch = threads(), count
        call.q = c.TensorStruct(q.data_ptr(), q.stride(0), layer.head_dim, q.stride(0))
        call.out = c.TensorStruct(out.data_ptr(), out.stride(0), layer.value_dim, out.stride(0))
        call.lse = lse.data_ptr()
        call.k, call.v = (c.TensorStruct(t.data_ptr(), 0, t.stride(1), t.stride(2)) for t in (k, v))
        call.scale_batch, call.scale_head = 0, scales[0].stride(1) if scales else 0
        rows, size = self._order.shape
        call.queries = c.TokensStruct(self._queries.data_ptr(), None, None, None, rows, 1)
        call.keys = c.TokensStruct(self._index.data_ptr(), None, None, self._order.data_ptr(), rows, size)
        call.plan = c.PlanStruct(
            *self._runs, count, 1, c.TILE, None if self.exact else self._alike.data_ptr()
        )


class PagedPast(PagedCall):
    """The past of the texts themselves, to which the new tokens, in `slots` int64 [R], belong.

    Pages are numbered by their tokens, so that what a row sees follows from its own token: `plan_rows` finds the
    blocks. Rows are written anew for texts whose pages have changed."""

    _rows: list[tuple[PageTable, int]]

    def __init__(self, attends: Attends, dtype: torch.dtype, exact: bool = False) -> None:
        self.slots = torch.zeros(MOST_ROWS, dtype=torch.int64)
        self._heads: list[c.HeadsStruct] = []
        super().__init__(attends, dtype, exact)

    def bind(self, attends: Attends, cache: PagedLayer, op: c.OpStruct) -> None:
        """A layer's heads go to its pages, and its operation attends to these."""
        super().bind(attends, cache, op)
        attends.heads.slots = self.slots.data_ptr()
        self._heads.append(attends.heads)

    def place(self, tokens: Tokens, rows: slice) -> None:
        """Numbers the slots of some of the tokens of a step, and describes what their queries see."""
        cache = self._layers[0][0]
        step, count = cache.cache.step_of(tokens), rows.stop - rows.start
        self.slots[:count] = step.writes[cache.of][rows]
        self._queries[:count, 0] = tokens.index[0, rows]
        self._fit(count, max(len(table.pages[cache.of]) for table in step.tables))
        texts = [table for table, n in zip(step.tables, step.counts, strict=True) for _ in range(n)]
        states = [(table, table.version) for table in texts[rows]]
        if self._rows[:count] != states:
            self._write(states, cache.of)
        for (layer, op), heads in zip(self._layers, self._heads, strict=True):
            k, v, *scales = layer.tensors
            if self._bound(layer.tensors, op):
                heads.k_cache, heads.v_cache = c.TensorStruct.of(k), c.TensorStruct.of(v)
                if scales:
                    heads.k_scale, heads.v_scale = (scale.data_ptr() for scale in scales)
                    heads.scale_head = scales[0].stride(1)
        call = self.call
        at, room = self._queries.data_ptr(), len(self._begin)
        plan_rows(call.program, call.instructions, at, count, self._runs, room)
        self._describe(count, *cache.tensors)

    def _write(self, states: Sequence[tuple[PageTable, int]], of: int) -> None:
        """Rows whose text is another one, or has other pages (`PageTable.version`), and what they have in common with
        the row before."""
        changed = [a != b for a, b in zip_longest(self._rows, states)]
        for r, (table, _) in enumerate(states):
            if changed[r]:
                slots = self._slots(table, of)
                self._order[r, : len(slots)] = slots
            if r and (changed[r - 1] or changed[r]):
                self._alike[r] = _alike(states[r - 1][0].pages[of], table.pages[of]) * PAGE
        self._rows = list(states)

    def _room(self, rows: int, pages: int) -> None:
        super()._room(rows, pages)
        self._rows = []


class PagedSource(PagedCall):
    """The sources of the texts, all of whose tokens are seen."""

    _tables: list[PageTable]

    def place(self, tables: Sequence[PageTable]) -> None:
        """Describes the keys of these sources, one for each row."""
        cache = self._layers[0][0]
        self._fit(len(tables), max(len(table.pages[cache.of]) for table in tables))
        if self._tables != list(tables):
            self._write(tables, cache.of)
        for layer, op in self._layers:
            self._bound(layer.tensors, op)
        self._describe(len(tables), *cache.tensors)

    def _write(self, tables: Sequence[PageTable], of: int) -> None:
        """A run of full blocks, and one of the block that is not."""
        self._tables, runs = list(tables), []
        for r, table in enumerate(tables):
            slots, whole = self._slots(table, of), len(table) // PAGE * PAGE
            self._alike[r] = whole if r and table is tables[r - 1] else 0
            self._order[r, : len(slots)] = slots
            self._index[r] = torch.where(self._at < len(table), self._at, -1)
            runs.append([run for run in ((0, whole, 1), (whole, len(slots), 0)) if run[0] < run[1]])
        numbers = torch.tensor([run for some in runs for run in some], dtype=torch.int32)
        for room, column in zip((self._begin, self._end, self._full), numbers.T, strict=True):
            room[: len(column)] = column
        self._first[: len(runs) + 1] = torch.tensor([0, *accumulate(map(len, runs))])

    def _room(self, rows: int, pages: int) -> None:
        super()._room(rows, pages)
        self._at = self._index[0].clone()
        self._tables = []


def _alike(before: Sequence[int | None], pages: Sequence[int | None]) -> int:
    """How many pages two texts begin with alike."""
    differ = (i for i, (a, b) in enumerate(zip(before, pages, strict=False)) if a != b)
    return len(pages) if before is pages else next(differ, min(len(before), len(pages)))
