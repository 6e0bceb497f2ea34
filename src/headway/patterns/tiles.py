"""Tiles: bounds over the tokens of a block of slots, by which a pattern judges two blocks without looking at pairs.

Legend: B rows, N slots.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.tokens import Tokens

_BIG = torch.iinfo(torch.int64).max // 4


@dataclass(frozen=True, eq=False)
class Extent:
    """Bounds over the tokens of each tile of slots; every tensor is [B, tiles] until it is grouped or broadcast.

    `lo` and `hi` bound `index` over the tile's tokens (lo > hi in a tile without any); `residue_lo` and
    `residue_hi` bound index modulo `step`.
    """

    lo: Tensor
    hi: Tensor
    document_lo: Tensor
    document_hi: Tensor
    any_global: Tensor
    all_global: Tensor
    any_token: Tensor
    all_tokens: Tensor
    residue_lo: Tensor
    residue_hi: Tensor
    step: int

    @staticmethod
    def of(tokens: Tokens, tile: int, step: int = 1) -> "Extent":
        """Extents of consecutive tiles of `tile` slots (the last one may be short); residues modulo `step`."""
        if tokens.static_key is not None:
            return Extent._regular(*tokens.static_key, tile, step, tokens.device)
        tokens = tokens.expand(tokens.rows)
        index = _tiled(tokens.index, tile)
        least, most = torch.aminmax(index, dim=-1)
        some, full = most >= 0, least >= 0
        valid = None if bool(full.all()) else index >= 0
        lo, hi = (least, most) if valid is None else _bounds(index, valid)
        document_lo = document_hi = residue_lo = residue_hi = torch.zeros_like(lo)
        if tokens.document is not None:
            document_lo, document_hi = _bounds(_tiled(tokens.document, tile), valid)
        if step > 1:
            residue_lo, residue_hi = _bounds(index % step, valid)
        any_global = all_global = torch.zeros_like(some)
        if tokens.is_global is not None:
            glob = _tiled(tokens.is_global, tile)
            any_global, all_global = glob.any(-1), (glob | (index < 0)).all(-1) & some
        documents, residues = (document_lo, document_hi), (residue_lo, residue_hi)
        return Extent(lo, hi, *documents, any_global, all_global, some, full, *residues, step)

    @staticmethod
    def _regular(start: int, count: int, tile: int, step: int, device: torch.device) -> "Extent":
        """The extents of start, start+1, ...: known without looking at the slots (residues: any of them)."""
        lo = torch.arange(start, start + count, tile, device=device).unsqueeze(0)
        hi = (lo + tile - 1).clamp(max=start + count - 1)
        zero, no = torch.zeros_like(lo), torch.zeros_like(lo, dtype=torch.bool)
        yes, most = ~no, zero if step == 1 else zero + step - 1
        return Extent(lo, hi, zero, zero, no, no, yes, yes, zero, most, step)

    @staticmethod
    def whole(start: int, count: int) -> "Extent":
        """The one extent of all of start, start+1, ..., in Python's numbers, which the leaves of `leaves.py` judge as
        they judge tensors, in a hundredth of the time."""
        numbers: list[Any] = [start, start + count - 1, 0, 0, False, False, True, True, 0, 0, 1]
        return Extent(*numbers)

    def grouped(self, count: int) -> "Extent":
        """The tiles in groups of `count` neighbours, [B, groups, count]; the last tile is repeated."""
        return self.map(lambda t: _tiled(t, count))

    def joined(self) -> "Extent":
        """The extents of the tiles along the last axis taken together."""
        some = self.any_token.any(-1)
        return Extent(
            lo=self.lo.amin(-1),
            hi=self.hi.amax(-1),
            document_lo=self.document_lo.amin(-1),
            document_hi=self.document_hi.amax(-1),
            any_global=self.any_global.any(-1),
            all_global=(self.all_global | ~self.any_token).all(-1) & some,
            any_token=some,
            all_tokens=self.all_tokens.all(-1),
            residue_lo=self.residue_lo.amin(-1),
            residue_hi=self.residue_hi.amax(-1),
            step=self.step,
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> "Extent":
        """The extent with every field changed alike along its tile axis; fields that are one tensor stay one."""
        tensors = {name: t for name, t in vars(self).items() if name != "step"}
        changed = {id(t): change(t) for t in {id(t): t for t in tensors.values()}.values()}
        return Extent(**{name: changed[id(t)] for name, t in tensors.items()}, step=self.step)


def _bounds(values: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """The least and the greatest value of each tile, over the valid slots (None: all)."""
    if valid is None:
        lo, hi = torch.aminmax(values, dim=-1)
        return lo, hi
    # aminmax where one bound is wanted: several times faster than amin over a short axis of int64
    lo, _ = torch.aminmax(torch.where(valid, values, _BIG), dim=-1)
    _, hi = torch.aminmax(torch.where(valid, values, -_BIG), dim=-1)
    return lo, hi


def _tiled(values: Tensor, tile: int) -> Tensor:
    """[B, N] -> [B, ceil(N / tile), tile]; the last value of a row is repeated, which moves no bound."""
    rows, count = values.shape
    short = -count % tile
    if short:
        values = torch.cat((values, values[:, -1:].expand(-1, short)), 1)
    return values.reshape(rows, -(-count // tile), tile)
