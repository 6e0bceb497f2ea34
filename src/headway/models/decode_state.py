"""What the layers of a step of decoding share: see `headway.models.decode_step`.

Legend: B sequences, T new tokens of each, R rows, of which the first B T are in use, D per head, d rotated.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from headway.attention import KeyValues
from headway.attention.backends.native import kernels
from headway.attention.call import validate
from headway.cache import KVCache
from headway.cache.table import Placement
from headway.native import interface as c
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
