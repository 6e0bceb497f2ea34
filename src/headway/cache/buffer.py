"""Slots of keys and values, with the tokens that they hold. Where a token is put is the cache's business.

Legend: B rows, K kv heads, S slots, D per key, E per value, T slots of a chunk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from headway.attention import KeyValues
from headway.tokens import Tokens


class Buffer:
    """k [B, K, S, D], v [B, K, S, E], and per slot index, is_global and position [B, S] (index -1: empty).

    In int8, with k_scale and v_scale [B, K, S] (`headway.quantization`).

    New memory is zeros, so that what was never written cannot hold NaN. Buffers are made outside inference
    mode, so that a cache filled there can be continued elsewhere. `is_global` and `position` exist from the
    first chunk on that has them.
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v
        self.k_scale, self.v_scale = (
            torch.zeros(t.shape[:3], device=t.device) if t.dtype == torch.int8 else None for t in (k, v)
        )
        self.index = torch.full((k.shape[0], k.shape[2]), -1, device=k.device)
        self.is_global: Tensor | None = None
        self.position: Tensor | None = None

    @staticmethod
    def empty(
        batch: int, kv_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
    ) -> Buffer:
        """No slots yet."""
        with torch.inference_mode(False):
            return Buffer(
                torch.zeros(batch, kv_heads, 0, head_dim, dtype=dtype, device=device),
                torch.zeros(batch, kv_heads, 0, value_dim, dtype=dtype, device=device),
            )

    @property
    def slots(self) -> int:
        return self.k.shape[2]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """k and v, and their scales in int8: in the order of `KeyValues.tensors`."""
        return tuple(t for t in (self.k, self.v, self.k_scale, self.v_scale) if t is not None)

    def grow(self, slots: int) -> None:
        """At least so many slots; the new ones are empty."""
        more = slots - self.slots
        if more <= 0:
            return

        def longer(old: Tensor, dim: int, value: float) -> Tensor:
            shape = list(old.shape)
            shape[dim] = slots
            new = torch.full(shape, value, dtype=old.dtype, device=old.device)
            new.narrow(dim, 0, old.shape[dim]).copy_(old)
            return new

        with torch.inference_mode(False):
            self.k, self.v = longer(self.k, 2, 0), longer(self.v, 2, 0)
            self.k_scale, self.v_scale = (
                None if t is None else longer(t, 2, 0) for t in (self.k_scale, self.v_scale)
            )
            self.index = longer(self.index, 1, -1)
            self.is_global = None if self.is_global is None else longer(self.is_global, 1, False)
            self.position = None if self.position is None else longer(self.position, 1, -1)

    def write_run(self, slot: int, new: KeyValues, column: int, count: int) -> None:
        """In every row, the chunk's columns column..column+count-1 go to the slots from `slot` on."""
        to, frm, tokens = slice(slot, slot + count), slice(column, column + count), new.tokens
        self._describe(tokens)
        for own, given in zip(self.tensors, new.tensors, strict=True):
            own[:, :, to] = given[:, :, frm]
        self.index[:, to] = tokens.index[:, frm]
        if self.is_global is not None:
            self.is_global[:, to] = tokens.globals[:, frm]
        if self.position is not None:
            self.position[:, to] = tokens.positions[:, frm]

    def write_at(self, rows: Tensor, slots: Tensor, new: KeyValues, columns: Tensor) -> None:
        """Token n, in row rows[n] and column columns[n] of the chunk, goes to slot slots[n] of its row."""
        batch, tokens = self.k.shape[0], new.tokens
        self._describe(tokens)
        for own, given in zip(self.tensors, new.tensors, strict=True):
            own[rows, :, slots] = given[rows, :, columns]
        self.index[rows, slots] = tokens.index.expand(batch, -1)[rows, columns]
        if self.is_global is not None:
            self.is_global[rows, slots] = tokens.globals.expand(batch, -1)[rows, columns]
        if self.position is not None:
            self.position[rows, slots] = tokens.positions.expand(batch, -1)[rows, columns]

    def _describe(self, tokens: Tokens) -> None:
        with torch.inference_mode(False):
            if tokens.is_global is not None and self.is_global is None:
                self.is_global = torch.zeros_like(self.index, dtype=torch.bool)
            if tokens.position is not None and self.position is None:
                self.position = self.index.clone()

    def view(self, slot: int, count: int, *, alike: bool = False, start: int | None = None) -> KeyValues:
        """The slots slot..slot+count-1, as views. `alike`: all rows hold the same indices, so that one row
        stands for them; `start`: they are known to be start, start+1, ..."""
        at = slice(slot, slot + count)
        tokens = Tokens(
            self.index[:1, at] if alike else self.index[:, at],
            is_global=None if self.is_global is None else self.is_global[:, at],
            position=None if self.position is None else self.position[:, at],
            start=start,
        )
        k, v, *scales = (t[:, :, at] for t in self.tensors)
        return KeyValues(k, v, tokens, *scales)

    def forget(self, lengths: Tensor) -> None:
        """Slots of tokens with index >= lengths [B] become empty."""
        self.index.masked_fill_(self.index >= lengths.unsqueeze(1), -1)

    def held(self) -> Tensor:
        """How many slots of each row hold a token.  int64 [B]"""
        return (self.index >= 0).sum(1)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> Buffer:
        """A buffer of changed tensors; `change` acts on the first dimension, and copies."""
        new = copy.copy(self)
        with torch.inference_mode(False):
            for name in ("k", "v", "k_scale", "v_scale", "index", "is_global", "position"):
                old = getattr(self, name)
                setattr(new, name, None if old is None else change(old))
        return new
