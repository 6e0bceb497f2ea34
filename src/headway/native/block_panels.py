"""Matrices quantized in blocks of 256 inputs (`headway.block_quantization`) in the kernels' layout.

Legend: I inputs, O outputs, P = ceil(O / 16) panels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headway.block_quantization import BLOCK, BlockMatrix
from headway.native.panels import GROUP, PANEL, packed_panels, panels_of

GROUPS = BLOCK // GROUP
SCALES = 2 * PANEL
"""Bytes of a group's scales in a panel: s and t, or (6 bits) s of the group's two halves."""


class BlockPanels(NamedTuple):
    """A matrix in panels of 16 outputs: for each block of 256 inputs d and dmin in float16, then eight groups.

    Attributes:
        data: uint8 [P, bytes of a panel].
        bits: 4, 5 or 6.
        outputs, inputs: O and I.
    """

    data: Tensor
    bits: int
    outputs: int
    inputs: int

    @classmethod
    def pack(cls, matrix: BlockMatrix) -> "BlockPanels":
        """Returns the same codes and scales reordered into panels."""
        outputs, inputs = matrix.codes.shape
        size = inputs // BLOCK * block_bytes(matrix.bits)
        data = packed_panels(
            outputs, inputs, size, lambda rows: _packed(matrix.moved(lambda t: t[rows])).flatten(1)
        )
        return cls(data, matrix.bits, outputs, inputs)

    def unpack(self, first: int = 0, count: int | None = None) -> BlockMatrix:
        """Returns the matrix of `count` panels (default: all) from panel `first` on."""
        data = self.data[first:] if count is None else self.data[first : first + count]
        outputs = min(len(data) * PANEL, self.outputs - first * PANEL)
        blocks = data.view(len(data), self.inputs // BLOCK, block_bytes(self.bits))
        head = 2 * PANEL * (1 + (self.bits < 6))
        groups = blocks[:, :, head:].unflatten(2, (GROUPS, -1))

        def of_rows(t: Tensor) -> Tensor:
            """Reorders [P, blocks, .., 16] to [O, ..]."""
            return t.movedim(-1, 1).flatten(2).flatten(0, 1)[:outputs].contiguous()

        d = blocks[:, :, :head].contiguous().view(torch.float16).unflatten(2, (-1, PANEL))
        scales = groups[..., -SCALES:].contiguous().unflatten(3, (2, PANEL))
        codes = of_rows(_codes(groups[..., :-SCALES], self.bits).transpose(-1, -2))
        if self.bits == 6:
            return BlockMatrix(
                codes, of_rows(scales.view(torch.int8)), None, of_rows(d[:, :, 0]), None, self.bits
            )
        scale, low, dmin = of_rows(scales[:, :, :, 0]), of_rows(scales[:, :, :, 1]), of_rows(d[:, :, 1])
        return BlockMatrix(codes, scale, low, of_rows(d[:, :, 0]), dmin, self.bits)

    def rows(self, at: Tensor) -> Tensor:
        """Returns the rows [n, I] with the indices `at` [n], in float32; only panels that contain one of them are
        unpacked."""
        panels, places = panels_of(at)
        subset = self._replace(data=self.data[panels], outputs=len(panels) * PANEL)
        return subset.unpack().dequantize()[places]


def block_bytes(bits: int) -> int:
    """Returns the bytes of a block of 256 inputs in a panel."""
    return GROUPS * (PANEL * GROUP * bits // 8 + SCALES) + 2 * PANEL * (1 + (bits < 6))


def _packed(matrix: BlockMatrix) -> Tensor:
    """Packs rows into whole panels: uint8 [panels, blocks, bytes]."""
    panels = -(-len(matrix.codes) // PANEL)

    def of_panels(t: Tensor, *sizes: int) -> Tensor:
        """Reorders [O, ..] to [panels, blocks, *sizes, 16]."""
        padded = t.new_zeros(panels * PANEL, t.shape[1])
        padded[: len(t)] = t
        return padded.view(panels, PANEL, -1, *sizes).movedim(1, -1)

    q = of_panels(matrix.codes, GROUPS, 2, 2, 2, 4).transpose(-1, -2)  # 8 quads of 4 inputs
    # Quad 4 h + 2 e + j stands at [h, e, j]: quads 0 1 4 5 (e = 0) go to the low four bits, 2 3 6 7 to the high ones.
    parts = [q[:, :, :, :, 0] & 15 | q[:, :, :, :, 1] << 4]
    if matrix.bits > 4:
        high, codes_per_byte = (q >> 4).flatten(3, 5), 8 // (matrix.bits - 4)
        shifts = torch.arange(codes_per_byte, dtype=torch.uint8).view(-1, 1, 1) * (matrix.bits - 4)
        parts.append((high.unflatten(3, (-1, codes_per_byte)) << shifts).sum(4, dtype=torch.uint8))
    scales = [of_panels(matrix.scale, GROUPS, 2 if matrix.low is None else 1).view(torch.uint8)]
    scales += [] if matrix.low is None else [of_panels(matrix.low, GROUPS, 1)]
    groups = torch.cat([part.flatten(3) for part in (*parts, torch.cat(scales, 3))], 3)
    heads = [of_panels(t) for t in (matrix.d, matrix.dmin) if t is not None]
    head = torch.cat([t.contiguous().view(torch.uint8).flatten(2) for t in heads], 2)
    return torch.cat((head, groups.flatten(2)), 2)


def _codes(groups: Tensor, bits: int) -> Tensor:
    """Unpacks [.., bytes of codes] to [.., 2, 2, 2, 16, 4], the inverse of `_packed`. Byte 0xB4 holds the low bits 4
    and 11."""
    low = groups[..., : 64 * 4].unflatten(-1, (2, 1, 2, PANEL, 4))
    q = torch.cat((low & 15, low >> 4), -4)
    if bits == 4:
        return q
    codes_per_byte = 8 // (bits - 4)
    shifts = torch.arange(codes_per_byte, dtype=torch.uint8).view(-1, 1, 1) * (bits - 4)
    high = groups[..., 64 * 4 :].unflatten(-1, (-1, 1, PANEL, 4)) >> shifts & (1 << bits - 4) - 1
    codes: Tensor = q | high.flatten(-4, -3).unflatten(-3, (2, 2, 2)) << 4
    return codes
