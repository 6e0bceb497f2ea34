"""Tiles: bounds over the tokens of a block of slots, from which a pattern judges two blocks without checking pairs.

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

    `lo` and `hi` bound `index` over the tile's tokens (lo > hi in a tile without tokens); `residue_lo` and
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
        """Returns the extents of consecutive tiles of `tile` slots (the last one may be shorter), with residues
        modulo `step`."""
        if tokens.static_key is not None:
            return Extent._regular(*tokens.static_key, tile, step, tokens.device)
        tokens = tokens.expand(tokens.rows)
        index = _tiled(tokens.index, tile)
        least, most = torch.aminmax(index, dim=-1)
        any_token, all_tokens = most >= 0, least >= 0
        valid = None if bool(all_tokens.all()) else index >= 0
        lo, hi = (least, most) if valid is None else _bounds(index, valid)
        document_lo = document_hi = residue_lo = residue_hi = torch.zeros_like(lo)
        if tokens.document is not None:
            document_lo, document_hi = _bounds(_tiled(tokens.document, tile), valid)
        if step > 1:
            residue_lo, residue_hi = _bounds(index % step, valid)
        any_global = all_global = torch.zeros_like(any_token)
        if tokens.is_global is not None:
            glob = _tiled(tokens.is_global, tile)
            any_global, all_global = glob.any(-1), (glob | (index < 0)).all(-1) & any_token
        documents, residues = (document_lo, document_hi), (residue_lo, residue_hi)
        return Extent(lo, hi, *documents, any_global, all_global, any_token, all_tokens, *residues, step)

    @staticmethod
    def _regular(start: int, count: int, tile: int, step: int, device: torch.device) -> "Extent":
        """Returns the extents of indices start, start+1, ..., computed without reading slots (residues are
        unbounded)."""
        lo = torch.arange(start, start + count, tile, device=device).unsqueeze(0)
        hi = (lo + tile - 1).clamp(max=start + count - 1)
        zero, no = torch.zeros_like(lo), torch.zeros_like(lo, dtype=torch.bool)
        yes, most = ~no, zero if step == 1 else zero + step - 1
        return Extent(lo, hi, zero, zero, no, no, yes, yes, zero, most, step)

    @staticmethod
    def whole(start: int, count: int) -> "Extent":
        """Returns the single extent of all indices start, start+1, ..., with Python numbers instead of tensors; the
        leaves of `leaves.py` judge them in a hundredth of the time."""
        numbers: list[Any] = [start, start + count - 1, 0, 0, False, False, True, True, 0, 0, 1]
        return Extent(*numbers)

    def grouped(self, count: int) -> "Extent":
        """Returns the tiles in groups of `count` neighbours, [B, groups, count]; the last tile is repeated to fill
        its group."""
        return self.map(lambda t: _tiled(t, count))

    def joined(self) -> "Extent":
        """Returns the extents of the union of the tiles along the last axis."""
        any_token = self.any_token.any(-1)
        return Extent(
            lo=self.lo.amin(-1),
            hi=self.hi.amax(-1),
            document_lo=self.document_lo.amin(-1),
            document_hi=self.document_hi.amax(-1),
            any_global=self.any_global.any(-1),
            all_global=(self.all_global | ~self.any_token).all(-1) & any_token,
            any_token=any_token,
            all_tokens=self.all_tokens.all(-1),
            residue_lo=self.residue_lo.amin(-1),
            residue_hi=self.residue_hi.amax(-1),
            step=self.step,
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> "Extent":
        """Returns the extent with the same change applied to every field; fields that share a tensor still share
        one."""
        tensors = {name: t for name, t in vars(self).items() if name != "step"}
        changed = {id(t): change(t) for t in {id(t): t for t in tensors.values()}.values()}
        return Extent(**{name: changed[id(t)] for name, t in tensors.items()}, step=self.step)


def _bounds(values: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the minimum and the maximum of each tile, over the valid slots (None: all)."""
    if valid is None:
        lo, hi = torch.aminmax(values, dim=-1)
        return lo, hi
    # aminmax although one bound is needed: it is several times faster than amin over a short axis of int64
    lo, _ = torch.aminmax(torch.where(valid, values, _BIG), dim=-1)
    _, hi = torch.aminmax(torch.where(valid, values, -_BIG), dim=-1)
    return lo, hi


def _tiled(values: Tensor, tile: int) -> Tensor:
    """Returns [B, N] as [B, ceil(N / tile), tile]; the last value of a row is repeated, which changes no bound."""
    rows, count = values.shape
    short = -count % tile
    if short:
        values = torch.cat((values, values[:, -1:].expand(-1, short)), 1)
    return values.reshape(rows, -(-count // tile), tile)
