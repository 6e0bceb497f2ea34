"""The rotary embedding of a step's queries and keys, in the form that the native kernels read."""

import torch

from headway.models.operations import NotLowered
from headway.native import interface as c
from headway.native.linear import MOST_ROWS
from headway.nn.positions import RotaryEmbedding
from headway.positions import RotaryTable
from headway.tokens import Tokens

KEPT = 8192
"""Number of positions whose cosines and sines are cached: 8 MiB for heads of 128."""


class Rotated:
    """Cosines and sines for the rows of a step, float32 [64, d], shared by layers with equal positions.

    Raises NotLowered for positions that the kernels do not support.
    """

    def __init__(self, rotary: RotaryEmbedding, dtype: torch.dtype) -> None:
        if rotary.positions.length_dependent:
            raise NotLowered("the kernels do not support rotations that depend on the length")
        if rotary.positions.grows:
            raise NotLowered("the kernels do not support query_growth")
        self.rotary, self.dtype = rotary, dtype
        table = self._table(Tokens.range(1))
        dims, at = table.dims, torch.arange(table.dims)
        # the partner of each coordinate, of 4: adjacent 1, 0, 3, 2; halves 2, 3, 0, 1
        partners = {"adjacent": at ^ 1, "halves": (at + dims // 2) % dims}
        partner = partners[table.pairing] if isinstance(table.pairing, str) else table.pairing
        self.partner = partner.int()
        self.cos, self.sin = torch.zeros(MOST_ROWS, dims), torch.zeros(MOST_ROWS, dims)
        self.rotates_values, self._kept = table.rotates_values, table

    def turn(self, tokens: Tokens) -> None:
        """Fills in cosines and sines for these tokens, [1, T]."""
        count, index = tokens.count, tokens.index[0]
        most = int(index.max())
        if most >= KEPT or self.rotary.frequency_offset is not None:
            table, rows = self._table(tokens), torch.arange(count)
        else:
            if most >= self._kept.cos.shape[-2]:  # for position 300: table of the first 512
                self._kept = self._table(Tokens.range(1 << most.bit_length()))
            table, rows = self._kept, index
        for buffer, new in ((self.cos, table.cos), (self.sin, table.sin)):
            torch.index_select(new.view(-1, table.dims), 0, rows, out=buffer[:count])

    def into(self, struct: c.HeadsStruct | c.SumsStruct) -> None:
        """Makes an operation rotate its heads, or their features, by these cosines and sines."""
        struct.cos, struct.sin, struct.partner = (t.data_ptr() for t in (self.cos, self.sin, self.partner))
        struct.rotated = struct.rotation_row = self.cos.shape[1]

    def _table(self, tokens: Tokens) -> RotaryTable:
        table = self.rotary(tokens, self.dtype)
        if not isinstance(table, RotaryTable):
            raise NotLowered("the kernels support rotations of pairs only, not by matrices")
        return table
