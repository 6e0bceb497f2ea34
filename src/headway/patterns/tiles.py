"""Tiles: what is known of a block of slots, so that a pattern can judge two blocks without looking at pairs.

Legend: B rows, N slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from headway.tokens import Tokens

_BIG = torch.iinfo(torch.int64).max // 4


@dataclass(frozen=True, eq=False)
class Extent:
    """Bounds over the tokens of each tile of slots; every tensor is [B, tiles] until it is broadcast.

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
    def of(tokens: Tokens, tile: int, step: int = 1) -> Extent:
        """Extents of consecutive tiles of `tile` slots (the last one may be short); residues modulo `step`."""
        if tokens.start is not None and tokens.is_global is None:
            return Extent._regular(tokens.start, tokens.count, tile, step, tokens.device)
        tokens = tokens.expand(tokens.rows)
        index, valid = _tiled(tokens.index, tile, -1), _tiled(tokens.valid, tile, False)
        some = valid.any(-1)
        lo = torch.where(valid, index, _BIG).amin(-1)
        hi = torch.where(valid, index, -_BIG).amax(-1)
        document_lo = document_hi = torch.zeros_like(lo)
        if tokens.document is not None:
            document = _tiled(tokens.document, tile, 0)
            document_lo = torch.where(valid, document, _BIG).amin(-1)
            document_hi = torch.where(valid, document, -_BIG).amax(-1)
        any_global = all_global = torch.zeros_like(some)
        if tokens.is_global is not None:
            glob = _tiled(tokens.is_global, tile, False)
            any_global, all_global = (glob & valid).any(-1), (glob | ~valid).all(-1) & some
        every = _tiled(torch.ones(1, tokens.count, dtype=torch.bool, device=tokens.device), tile, False)
        full = (valid | ~every).all(-1)
        residue_lo = residue_hi = torch.zeros_like(lo)
        if step > 1:
            residue_lo = torch.where(valid, index % step, _BIG).amin(-1)
            residue_hi = torch.where(valid, index % step, -_BIG).amax(-1)
        return Extent(
            lo,
            hi,
            document_lo,
            document_hi,
            any_global,
            all_global,
            some,
            full,
            residue_lo,
            residue_hi,
            step,
        )

    @staticmethod
    def _regular(start: int, count: int, tile: int, step: int, device: torch.device) -> Extent:
        """The extents of start, start+1, ...: known without looking at the slots (residues: any of them)."""
        lo = torch.arange(start, start + count, tile, device=device).unsqueeze(0)
        zero, no = torch.zeros_like(lo), torch.zeros_like(lo, dtype=torch.bool)
        hi = (lo + tile - 1).clamp(max=start + count - 1)
        return Extent(lo, hi, zero, zero, no, no, ~no, ~no, zero, zero + step - 1, step)

    def coarser(self, count: int) -> Extent:
        """The extents of every `count` neighbouring tiles taken together, from the extents of the tiles."""
        short = -self.lo.shape[1] % count

        def joined(t: Tensor, fill: int | bool, how: Callable[[Tensor, int], Tensor]) -> Tensor:
            padded = torch.nn.functional.pad(t, (0, short), value=fill) if short else t
            return how(padded.reshape(t.shape[0], -1, count), -1)

        some = joined(self.any_token, False, torch.any)
        return Extent(
            lo=joined(self.lo, _BIG, torch.amin),
            hi=joined(self.hi, -_BIG, torch.amax),
            document_lo=joined(self.document_lo, _BIG, torch.amin),
            document_hi=joined(self.document_hi, -_BIG, torch.amax),
            any_global=joined(self.any_global, False, torch.any),
            all_global=joined(self.all_global | ~self.any_token, True, torch.all) & some,
            any_token=some,
            all_tokens=joined(self.all_tokens, True, torch.all),
            residue_lo=joined(self.residue_lo, _BIG, torch.amin),
            residue_hi=joined(self.residue_hi, -_BIG, torch.amax),
            step=self.step,
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Extent:
        """The extent with every field changed alike along its tile axis."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "step"}
        return Extent(**{name: change(t) for name, t in tensors.items()}, step=self.step)


def _tiled(values: Tensor, tile: int, fill: int | bool) -> Tensor:
    """[B, N] -> [B, ceil(N / tile), tile], padded with `fill`."""
    short = -values.shape[1] % tile
    if short:
        values = torch.nn.functional.pad(values, (0, short), value=fill)
    return values.reshape(values.shape[0], -1, tile)
