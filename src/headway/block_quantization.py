"""Weights of 4 to 6 bits in blocks of 256 inputs with integer scales per sub-block: the K-quants of llama.cpp.

    q4_K, q5_K    w' = (d s) code - (dmin t)    sub-blocks of 32 inputs: s and t from 0 to 63
    q6_K          w' = (d s) (code - 32)        sub-blocks of 16 inputs: s from -128 to 127

d and dmin are float16, one for each block of an output row. Every product is rounded to float32: d s and dmin t are
exact there, and so is d s (code - 32) except for its last bits. (ggml-org/llama.cpp, ggml/src/ggml-quants.c.)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.quantization import QuantizedMatrix

BLOCK = 256
PARTS = {4: 32, 5: 32, 6: 16}
"""Number of inputs that share a scale (the sub-block), by the bits of a code."""


@dataclass(frozen=True)
class BlockMatrix:
    """Quantized weights [O, I] in blocks of 256 inputs.

    Attributes:
        codes: uint8 [O, I], each in 0 .. 2^bits - 1.
        scale: s, uint8 [O, I / 32]; for 6 bits int8 [O, I / 16].
        low: t, uint8 [O, I / 32]; None for 6 bits.
        d, dmin: float16 [O, I / 256]; dmin is None for 6 bits.
        bits: 4, 5 or 6.
    """

    codes: Tensor
    scale: Tensor
    low: Tensor | None
    d: Tensor
    dmin: Tensor | None
    bits: int

    def moved(self, move: Callable[[Tensor], Tensor]) -> "BlockMatrix":
        """Returns the matrix with `move` applied to each of its tensors [O, ...]."""
        low, dmin = (None if t is None else move(t) for t in (self.low, self.dmin))
        return replace(
            self, codes=move(self.codes), scale=move(self.scale), low=low, d=move(self.d), dmin=dmin
        )

    def part(self, axis: int, rows: range) -> "BlockMatrix":
        """Returns some outputs (axis 0), or the inputs (axis 1) of whole blocks."""
        assert axis == 0 or rows.start % BLOCK == len(rows) % BLOCK == 0
        length = self.codes.shape[axis]
        leading = [slice(None)] * axis

        def cut(t: Tensor) -> Tensor:
            per_entry = length // t.shape[axis]
            return t[*leading, rows.start // per_entry : rows.stop // per_entry]

        return self.moved(cut)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns w' [O, I], computed in float32 and rounded to `dtype`."""
        part = PARTS[self.bits]
        parts = BLOCK // part
        codes = self.codes.float().view(len(self.codes), self.codes.shape[1] // part, part)
        scale = (self.d.float().repeat_interleave(parts, 1) * self.scale.float()).unsqueeze(2)
        if self.low is None or self.dmin is None:
            return (scale * (codes - 32)).flatten(1).to(dtype)
        low = (self.dmin.float().repeat_interleave(parts, 1) * self.low.float()).unsqueeze(2)
        return (scale * codes - low).flatten(1).to(dtype)


CodedMatrix = QuantizedMatrix | BlockMatrix
"""The forms in which a file may hold the quantized weights of a layer."""


def quantize_blocks(weight: Tensor, bits: int) -> BlockMatrix:
    """Returns weights [O, I], I a multiple of 256, quantized to the nearest codes.

    For 4 and 5 bits the codes of a sub-block span its least to its largest weight, 0 included; for 6 bits they span 0
    to its largest magnitude on either side. Scales are rounded to integers; the largest of a block is 63, or 127 for 6
    bits."""
    blocks = weight.float().view(len(weight), -1, BLOCK // PARTS[bits], PARTS[bits])
    largest = (1 << bits) - 1
    if bits == 6:
        d, s = _whole(blocks.abs().amax(3) / 31, 127)
        shifted, t, dmin = blocks + 32 * _spread(d, s), None, None
    else:
        least = blocks.amin(3).clamp_max(0)
        d, s = _whole((blocks.amax(3).clamp_min(0) - least) / largest, 63)
        dmin, t = _whole(-least, 63)
        shifted = blocks + _spread(dmin, t)
    codes = (shifted / _spread(d, s)).nan_to_num(0.0, 0.0, 0.0).round().clamp(0, largest).to(torch.uint8)
    scale = s.flatten(1).to(torch.int8 if bits == 6 else torch.uint8)
    low = None if t is None else t.flatten(1).to(torch.uint8)
    return BlockMatrix(codes.flatten(1), scale, low, d, dmin, bits)


def _whole(values: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Factors values [O, blocks, parts] into d [O, blocks], float16, times integers in 0 .. most.

    d is the block's largest value over `most`, rounded up."""
    exact = values.amax(2) / most
    d = exact.half()
    # adding 1 to the bits gives the next larger float16: 0x3C00 is 1, 0x3C01 is 1 + 2^-10
    d = torch.where(d.float() < exact, (d.view(torch.int16) + 1).view(torch.float16), d)
    integers = (values / d.float().unsqueeze(2)).nan_to_num(0.0, 0.0, 0.0).round().clamp(0, most)
    return d, integers


def _spread(d: Tensor, whole: Tensor) -> Tensor:
    """Returns the products d * whole of `_whole`'s factors, [O, blocks, parts, 1]."""
    return (d.float().unsqueeze(2) * whole).unsqueeze(3)
