"""What a step of decoding attends to in pages: see `headway.models.decode_step`.

Legend: R rows, S slots of the longest text.
"""

from __future__ import annotations

import ctypes

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


class PagedPast:
    """What layers of one pattern and one class of pages share: the slots of the new tokens, int64 [R], and the call.

    Every row is one query, whose keys are the pages of its text, numbered by their tokens, so that what a row sees
    follows from its own token: `headway_plan_rows` finds the blocks. `order` [R, S] says in which slot each key lies,
    and is written anew for texts whose pages have changed."""

    def __init__(self, attends: Attends) -> None:
        self.attends = attends
        self.slots = torch.zeros(MOST_ROWS, dtype=torch.int64)
        self._layers: list[tuple[PagedLayer, c.HeadsStruct, c.OpStruct]] = []
        self._queries = torch.zeros(MOST_ROWS, 1, dtype=torch.int32)
        self._rows: list[tuple[PageTable, int] | None] = []
        self._template = self._of_one_key()  # all that does not change, and what it points to
        self.call = self._template.struct
        self._room(8)

    def bind(self, attends: Attends, cache: PagedLayer, op: c.OpStruct) -> None:
        """A layer's heads go to its pages, and its operation attends to these."""
        attends.heads.slots, op.of = self.slots.data_ptr(), ctypes.addressof(self.call)
        self._layers.append((cache, attends.heads, op))

    def place(self, tokens: Tokens, batch: int) -> None:
        """Numbers the slots of the new tokens, and describes what their queries see."""
        cache = self._layers[0][0]
        step, count = cache.cache.step_of(tokens), tokens.count
        self.slots[:count] = step.writes[cache.of]
        self._queries[:count, 0] = tokens.index[0]
        longest = max(len(table.pages[cache.of]) for table in step.tables)
        if longest * PAGE > self._index.shape[1]:
            self._room(2 * longest)
        texts = [table for table, n in zip(step.tables, step.counts, strict=True) for _ in range(n)]
        for r, table in enumerate(texts):
            if self._rows[r] != (table, table.version):
                self._write(r, table, cache.of)
        for layer, heads, op in self._layers:
            k, v = layer.tensors
            if op.k != k.data_ptr() or heads.k_cache.head != k.stride(1):
                heads.k_cache, heads.v_cache = c.TensorStruct.of(k), c.TensorStruct.of(v)
                op.k, op.v = k.data_ptr(), v.data_ptr()
        self._describe(count, *cache.tensors)

    def _write(self, r: int, table: PageTable, of: int) -> None:
        pages = torch.tensor([page or 0 for page in table.pages[of]], dtype=torch.int32)
        slots = (pages * PAGE).unsqueeze(1) + torch.arange(PAGE, dtype=torch.int32)
        self._order[r, : slots.numel()] = slots.flatten()
        self._rows[r] = table, table.version

    def _room(self, pages: int) -> None:
        """Room for texts of so many pages."""
        self._index = torch.arange(pages * PAGE, dtype=torch.int32).expand(MOST_ROWS, -1).contiguous()
        self._order = torch.zeros_like(self._index)
        self._first = torch.zeros(MOST_ROWS + 1, dtype=torch.int32)
        self._begin, self._end = (torch.zeros(MOST_ROWS * pages, dtype=torch.int32) for _ in range(2))
        self._full = torch.zeros(MOST_ROWS * pages, dtype=torch.uint8)
        self._rows = [None] * MOST_ROWS

    def _of_one_key(self) -> kernels.Arguments:
        """The call of one query and one key."""
        layer, mixer, scores, q, *_ = self.attends
        query = q[:1].view(1, 1, layer.heads.query_heads, -1).transpose(1, 2)
        k, v = (q.new_zeros(1, layer.heads.kv_heads, 1, size) for size in (layer.head_dim, layer.value_dim))
        steps, tokens = tuple(step for some in scores for step in some()), Tokens.range(1)
        keys = [KeyValues(k, v, tokens)]
        return kernels.Arguments(
            validate(query, tokens, keys, mixer.pattern, None, steps, mixer.scale, 0.0, None), 0
        )

    def _describe(self, count: int, k: Tensor, v: Tensor) -> None:
        call = self.call
        first, begin, end, full = self._first, self._begin, self._end, self._full
        runs = first.data_ptr(), begin.data_ptr(), end.data_ptr(), full.data_ptr()
        code = ctypes.addressof(call.program.contents)
        plan_rows(code, call.instructions, self._queries.data_ptr(), count, runs, len(begin))
        layer, _, _, q, out, lse, *_ = self.attends
        call.threads, call.batch = threads(), count
        call.q = c.TensorStruct(q.data_ptr(), q.stride(0), layer.head_dim, q.stride(0))
        call.out = c.TensorStruct(out.data_ptr(), out.stride(0), layer.value_dim, out.stride(0))
        call.lse = lse.data_ptr()
        call.k, call.v = (c.TensorStruct(t.data_ptr(), 0, t.stride(1), t.stride(2)) for t in (k, v))
        rows, size = self._order.shape
        call.queries = c.TokensStruct(self._queries.data_ptr(), None, None, None, rows, 1)
        call.keys = c.TokensStruct(self._index.data_ptr(), None, None, self._order.data_ptr(), rows, size)
        call.plan = c.PlanStruct(*runs, count, 1, c.TILE)
