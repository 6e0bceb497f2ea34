"""What the layers of a step of decoding share: see `headway.models.decode_step`.

Legend: B sequences, T new tokens of each, R rows, of which the first B T are in use, D per head, d rotated.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from headway.attention import KeyValues
from headway.attention.backends.native import kernels
from headway.attention.backends.native.plan_arrays import program
from headway.attention.call import validate
from headway.cache import PAGE, KVCache, PagedLayer, PageTable
from headway.cache.table import Placement
from headway.native import interface as c
from headway.native.loader import library, threads
from headway.nn.attention import AttentionLayer
from headway.nn.mixers import SoftmaxMixer
from headway.nn.positions import RotaryEmbedding
from headway.positions import RotaryTable
from headway.tokens import Tokens


class PastOf(NamedTuple):
    """A layer's cache, where its heads are described, and the operation that attends to it."""

    cache: KVCache
    heads: c.HeadsStruct
    op: c.OpStruct


class PagedPastOf(NamedTuple):
    """The same of a layer of a `PagedCache`."""

    cache: PagedLayer
    heads: c.HeadsStruct
    op: c.OpStruct


class Past:
    """What layers of one pattern and one table of slots share: the slots of the new tokens, int64 [R], -1 for those
    that are not stored, and the call."""

    def __init__(self, layer: AttentionLayer, q: Tensor, out: Tensor, lse: Tensor) -> None:
        self.layer, self.q, self.out, self.lse = layer, q, out, lse
        self.layers: list[PastOf] = []
        self.slots = torch.zeros(len(q), dtype=torch.int64)
        self.call = c.CallStruct()
        self._arguments: kernels.Arguments | None = None  # what the call points to

    def place(self, tokens: Tokens, batch: int) -> None:
        """Numbers the slots of the new tokens, and describes what their queries see."""
        placement, *_ = [cache.place(tokens) for cache, _, _ in self.layers]
        assert placement.past is None  # by `unsupported_reason`, nothing that they see is forgotten
        slots = self.slots[: batch * tokens.count].view(batch, tokens.count)
        _write_slots(slots, placement)
        for cache, heads, op in self.layers:
            k, v = cache.tensors
            if op.k != k.data_ptr() or heads.k_cache.head != k.stride(1):
                heads.k_cache, heads.v_cache = c.TensorStruct.of(k), c.TensorStruct.of(v)
                op.k, op.v = k.data_ptr(), v.data_ptr()
        self._arguments = self._see(placement, batch, k, v)
        ctypes.memmove(
            ctypes.addressof(self.call), ctypes.addressof(self._arguments.struct), ctypes.sizeof(self.call)
        )

    def _see(self, placement: Placement, batch: int, k: Tensor, v: Tensor) -> kernels.Arguments:
        layer, tokens = self.layer, placement.chunk.tokens
        heads, count, mixer = layer.heads.query_heads, placement.tokens.count, layer.mixer
        assert isinstance(mixer, SoftmaxMixer)
        q, out = (
            t[: batch * tokens.count].view(batch, tokens.count, heads, -1).transpose(1, 2)
            for t in (self.q, self.out)
        )
        keys = KeyValues(k.narrow(2, 0, count), v.narrow(2, 0, count), placement.tokens)
        call = validate(q, tokens, [keys], mixer.pattern, None, (), mixer.scale, 0.0, None)
        found = kernels.Arguments(call, 0)
        found.struct.out, found.struct.lse = c.TensorStruct.of(out), self.lse.data_ptr()
        return found


class PagedPast:
    """As `Past`, where rows are texts of a `PagedCache`: every row is one query, whose keys are the pages of its text.

    Keys are numbered by their tokens, so that what a row sees follows from its own token; `order` [R, S] says in which
    slot each of them lies, and is written anew for texts whose pages have changed."""

    def __init__(self, layer: AttentionLayer, q: Tensor, out: Tensor, lse: Tensor) -> None:
        self.layer, self.q, self.out, self.lse = layer, q, out, lse
        self.layers: list[PagedPastOf] = []
        self.slots = torch.zeros(len(q), dtype=torch.int64)
        self.call = c.CallStruct()
        self._queries = torch.zeros(len(q), 1, dtype=torch.int32)
        self._program = array("i", program(layer.pattern))
        self._rows: list[tuple[PageTable, int] | None] = []
        self._grow(8)

    def _grow(self, pages: int) -> None:
        rows = len(self.q)
        self._index = torch.arange(pages * PAGE, dtype=torch.int32).expand(rows, -1).contiguous()
        self._order = torch.zeros_like(self._index)
        self._first = torch.zeros(rows + 1, dtype=torch.int32)
        self._begin, self._end = torch.zeros(2, rows * pages, dtype=torch.int32)
        self._full = torch.zeros(rows * pages, dtype=torch.uint8)
        self._rows = [None] * rows

    def place(self, tokens: Tokens, batch: int) -> None:
        """Numbers the slots of the new tokens, and describes what their queries see."""
        cache = self.layers[0].cache
        step = cache.cache.step_of(tokens)
        count, index = tokens.count, tokens.index[0]
        self.slots[:count] = step.writes[cache.of]
        self._queries[:count, 0] = index
        longest = max(len(table.pages[cache.of]) for table in step.tables)
        if longest > self._index.shape[1] // PAGE:
            self._grow(2 * longest)
        texts = [table for table, n in zip(step.tables, step.counts, strict=True) for _ in range(n)]
        for r, table in enumerate(texts):
            if self._rows[r] != (table, table.version):
                pages = torch.tensor([page or 0 for page in table.pages[cache.of]], dtype=torch.int32)
                at = (pages * PAGE).unsqueeze(1) + torch.arange(PAGE, dtype=torch.int32)
                self._order[r, : at.numel()] = at.flatten()
                self._rows[r] = table, table.version
        self._describe(count)
        for layer, heads, op in self.layers:
            k, v = layer.tensors
            if op.k != k.data_ptr() or heads.k_cache.head != k.stride(1):
                heads.k_cache, heads.v_cache = c.TensorStruct.of(k), c.TensorStruct.of(v)
                op.k, op.v = k.data_ptr(), v.data_ptr()
        k, v = cache.tensors
        self.call.k, self.call.v = (c.TensorStruct(t.data_ptr(), 0, t.stride(1), t.stride(2)) for t in (k, v))

    def _describe(self, count: int) -> None:
        found = library()
        assert found is not None
        arrays = [t.data_ptr() for t in (self._first, self._begin, self._end, self._full)]
        found.dll.headway_plan_rows(
            self._program.buffer_info()[0],
            len(self._program) // 4,
            self._queries.data_ptr(),
            count,
            *arrays,
            len(self._begin),
        )
        layer, call, mixer = self.layer, self.call, self.layer.mixer
        assert isinstance(mixer, SoftmaxMixer)
        width = self.q.stride(0)
        call.abi, call.threads, call.batch = c.ABI, threads(), count
        call.heads, call.kv_heads = layer.heads.query_heads, layer.heads.kv_heads
        call.dim, call.dim_v = layer.head_dim, layer.value_dim
        call.type = call.kv_type = c.TYPES[self.q.dtype]
        call.q = c.TensorStruct(self.q.data_ptr(), width, layer.head_dim, width)
        call.out = c.TensorStruct(
            self.out.data_ptr(), self.out.stride(0), layer.value_dim, self.out.stride(0)
        )
        call.lse = self.lse.data_ptr()
        call.scale = layer.head_dim**-0.5 if mixer.scale is None else mixer.scale
        call.queries = c.TokensStruct(self._queries.data_ptr(), None, None, None, count, 1)
        keys = self._index.shape[1]
        call.keys = c.TokensStruct(
            self._index.data_ptr(), None, None, self._order.data_ptr(), len(self.q), keys
        )
        call.plan = c.PlanStruct(*arrays, count, 1, c.TILE)
        call.program = ctypes.cast(self._program.buffer_info()[0], ctypes.POINTER(ctypes.c_int32))
        call.instructions = len(self._program) // 4


def _write_slots(slots: Tensor, placement: Placement) -> None:
    """Slots [B, T] of the tokens of a chunk."""
    slots.fill_(-1)
    for (_, to), taken in placement.writes:
        slots[... if taken is None else taken] = (
            torch.arange(to.start, to.stop) if isinstance(to, slice) else to
        )


class Rotated:
    """Cosines and sines of the new tokens, which layers of equal positions share: float32 [R, d]."""

    def __init__(self, rotary: RotaryEmbedding, rows: int, dtype: torch.dtype) -> None:
        self.rotary, self.dtype = rotary, dtype
        table = self._table(Tokens.range(1))
        dims, at = table.dims, torch.arange(table.dims)
        partner = at ^ 1 if table.pairing == "adjacent" else (at + dims // 2) % dims
        self.partner = (partner if table.partner is None else table.partner).int()
        self.cos, self.sin = torch.zeros(rows, dims), torch.zeros(rows, dims)
        self.rotates_values = table.rotates_values

    def turn(self, tokens: Tokens, batch: int) -> None:
        """The numbers of these tokens."""
        table = self._table(tokens)
        for own, new in ((self.cos, table.cos), (self.sin, table.sin)):
            own[: batch * tokens.count].view(batch, tokens.count, -1).copy_(
                new.view(-1, tokens.count, table.dims)
            )

    def into(self, struct: c.HeadsStruct) -> None:
        """Has heads turned by them."""
        struct.cos, struct.sin, struct.partner = (t.data_ptr() for t in (self.cos, self.sin, self.partner))
        struct.rotated = struct.rotation_row = self.cos.shape[1]
        struct.rotates_values = int(self.rotates_values)

    def _table(self, tokens: Tokens) -> RotaryTable:
        table = self.rotary(tokens, self.dtype)
        assert isinstance(table, RotaryTable)
        return table
