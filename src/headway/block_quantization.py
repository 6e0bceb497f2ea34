"""Weights of 4 to 6 bits in blocks of 256 inputs, whose parts have whole numbers as scales: the K-quants of llama.cpp.

    q4_K, q5_K    w' = (d s) code - (dmin t)    parts of 32 inputs: s and t from 0 to 63
    q6_K          w' = (d s) (code - 32)        parts of 16 inputs: s from -128 to 127

d and dmin are float16, one for each block of an output. Products are rounded to float32 one by one; d s and dmin t, and
d s (code - 32) but for its last bits, are exact there. (ggml-org/llama.cpp, ggml/src/ggml-quants.c.)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.quantization import QuantizedMatrix

BLOCK = 256
PARTS = {4: 32, 5: 32, 6: 16}
"""Inputs that share a scale, by the bits of codes."""


@dataclass(frozen=True)
class BlockMatrix:
    """Weights [O, I] in blocks.

    Attributes:
        codes: uint8 [O, I], each in 0 .. 2^bits - 1.
        scale: s, [O, I / 32] uint8; of 6 bits [O, I / 16] int8.
        low: t, [O, I / 32] uint8; None of 6 bits.
        d, dmin: float16 [O, I / 256]; dmin is None of 6 bits.
        bits: 4, 5 or 6.
    """

    codes: Tensor
    scale: Tensor
    low: Tensor | None
    d: Tensor
    dmin: Tensor | None
    bits: int

    def moved(self, move: Callable[[Tensor], Tensor]) -> "BlockMatrix":
        """The matrix whose outputs are those that `move` makes of tensors [O, ..]."""
        low, dmin = (None if t is None else move(t) for t in (self.low, self.dmin))
        return replace(
            self, codes=move(self.codes), scale=move(self.scale), low=low, d=move(self.d), dmin=dmin
        )

    def part(self, axis: int, rows: range) -> "BlockMatrix":
        """Some outputs (axis 0), or some inputs (axis 1) that are whole blocks."""
        assert axis == 0 or rows.start % BLOCK == len(rows) % BLOCK == 0
        whole = self.codes.shape[axis]
        at = [slice(None)] * axis

        def cut(t: Tensor) -> Tensor:
            each = whole // t.shape[axis]
            return t[*at, rows.start // each : rows.stop // each]

        return self.moved(cut)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """w' [O, I], in float32, rounded to `dtype`."""
        part = PARTS[self.bits]
        each = BLOCK // part
        codes = self.codes.float().view(len(self.codes), self.codes.shape[1] // part, part)
        scale = (self.d.float().repeat_interleave(each, 1) * self.scale.float()).unsqueeze(2)
        if self.low is None or self.dmin is None:
            return (scale * (codes - 32)).flatten(1).to(dtype)
        low = (self.dmin.float().repeat_interleave(each, 1) * self.low.float()).unsqueeze(2)
        return (scale * codes - low).flatten(1).to(dtype)


CodedMatrix = QuantizedMatrix | BlockMatrix
"""The forms in which a file may hold the weights of a layer in few bits."""


def quantize_blocks(weight: Tensor, bits: int) -> BlockMatrix:
    """Weights [O, I], I a multiple of 256, at the nearest codes of scales that reach from the least of a part to its
    largest, 0 among them; of 6 bits to the largest in size. Scales are the nearest whole numbers, the largest of a
    block 63, or 127."""
    blocks = weight.float().view(len(weight), -1, BLOCK // PARTS[bits], PARTS[bits])
    most = (1 << bits) - 1
    if bits == 6:
        d, s = _whole(blocks.abs().amax(3) / 31, 127)
        shifted, t, dmin = blocks + 32 * _spread(d, s), None, None
    else:
        least = blocks.amin(3).clamp_max(0)
        d, s = _whole((blocks.amax(3).clamp_min(0) - least) / most, 63)
        dmin, t = _whole(-least, 63)
        shifted = blocks + _spread(dmin, t)
    codes = (shifted / _spread(d, s)).nan_to_num(0.0, 0.0, 0.0).round().clamp(0, most).to(torch.uint8)
    scale = s.flatten(1).to(torch.int8 if bits == 6 else torch.uint8)
    low = None if t is None else t.flatten(1).to(torch.uint8)
    return BlockMatrix(codes.flatten(1), scale, low, d, dmin, bits)


def _whole(values: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Numbers [O, blocks, parts] as d [O, blocks], the float16 above the largest over `most`, times whole numbers."""
    exact = values.amax(2) / most
    d = exact.half()
    # one more in the bits is the next float16 above: 0x3C00 is 1, 0x3C01 is 1 + 2^-10
    d = torch.where(d.float() < exact, (d.view(torch.int16) + 1).view(torch.float16), d)
    whole = (values / d.float().unsqueeze(2)).nan_to_num(0.0, 0.0, 0.0).round().clamp(0, most)
    return d, whole


def _spread(d: Tensor, whole: Tensor) -> Tensor:
    """The products of `_whole` [O, blocks, parts, 1]."""
    return (d.float().unsqueeze(2) * whole).unsqueeze(3)
