"""Quantization: keys and values as int8 with one scale per token and kv head, weights as 8- or 4-bit codes.

Keys and values:

    scale = max |x| / 127        q = round(x / scale)        x' = scale q        |x - x'| <= scale / 2

(Symmetric rounding to nearest, ties to even; per token as in Sheng et al. 2023, "FlexGen", which uses groups.)

A row of zeros has scale 0. A row with a NaN or an infinity has a non-finite scale and is dequantized to NaN throughout,
so that the fault is visible to every query that attends to the row, and to no other. Rows whose largest magnitude is
below 127 * 2^-126 have a subnormal scale and lose digits, as subnormal float32 numbers do.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LARGEST = 127
SCALE_BYTES = 4


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x [..., D] as (int8 [..., D], scale float32 [...])."""
    scale = x.abs().amax(-1).float() / LARGEST
    ratio = (x.float() / scale.unsqueeze(-1)).nan_to_num(0.0, 0.0, 0.0)
    return ratio.round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns scale q [..., D], computed in float32 and rounded to `dtype`."""
    return (q.float() * scale.unsqueeze(-1)).to(dtype)


def row_bytes(width: int, dtype: torch.dtype) -> int:
    """Returns the bytes of a stored row of `width` numbers, including the scale if `dtype` is int8."""
    return width * dtype.itemsize + SCALE_BYTES * (dtype == torch.int8)


@dataclass(frozen=True)
class QuantizedMatrix:
    """Quantized weights [O, I] with one scale per group of inputs: w' = scale (code - zero).

    Attributes:
        codes: uint8 [O, I], each in 0 .. 2^bits - 1.
        scale: [O, G]; G = 1 is one scale per row, else group g holds inputs g * group to (g + 1) * group - 1.
        zero: uint8 [O, G], the zero points; None is the middle, 2^(bits - 1).
        bits: 8 or 4.
        group: number of inputs in a group.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    group: int

    @property
    def zero_or_middle(self) -> Tensor:
        """The zero points, uint8 [O, G]."""
        middle = 1 << self.bits - 1
        return (
            self.scale.new_full(self.scale.shape, middle, dtype=torch.uint8)
            if self.zero is None
            else self.zero
        )

    def moved(self, move: Callable[[Tensor], Tensor]) -> "QuantizedMatrix":
        """Returns the matrix with `move` applied to each of its tensors [O, ...]."""
        zero = None if self.zero is None else move(self.zero)
        return replace(self, codes=move(self.codes), scale=move(self.scale), zero=zero)

    def part(self, axis: int, rows: range) -> "QuantizedMatrix":
        """Returns some outputs (axis 0), or the inputs (axis 1) of whole groups or inside a row's only group."""
        at = slice(rows.start, rows.stop)
        if axis == 0:
            return self.moved(lambda t: t[at])
        if self.scale.shape[1] == 1:
            return replace(self, codes=self.codes[:, at], group=len(rows))
        assert rows.start % self.group == len(rows) % self.group == 0
        groups = slice(rows.start // self.group, rows.stop // self.group)
        zero = None if self.zero is None else self.zero[:, groups]
        return replace(self, codes=self.codes[:, at], scale=self.scale[:, groups], zero=zero)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns w' [O, I], computed in float32 and rounded to `dtype`."""
        inputs = self.codes.shape[1]
        scale, zero = (
            t.float().repeat_interleave(self.group, 1)[:, :inputs] for t in (self.scale, self.zero_or_middle)
        )
        return (scale * (self.codes.float() - zero)).to(dtype)


def quantize_weights(
    weight: Tensor, bits: int, group: int | None = None, *, symmetric: bool = True
) -> QuantizedMatrix:
    """Returns weights [O, I] rounded to the nearest codes; `group` inputs share a scale (by default the whole row).

        symmetric     scale = max |w| / (2^(bits - 1) - 1)
        else          scale = (max(w, 0) - min(w, 0)) / (2^bits - 1), zero = round(-min / scale)

    Raises ValueError for bits other than 8 and 4."""
    if bits not in (4, 8):
        raise ValueError(f"weights are quantized to 8 or 4 bits, not to {bits}")
    outputs, inputs = weight.shape
    size = min(group or inputs, inputs)
    groups = -(-inputs // size)
    padded = weight.new_zeros(outputs, groups * size, dtype=torch.float32)
    padded[:, :inputs] = weight
    parts = padded.view(outputs, groups, size)
    largest, middle = (1 << bits) - 1, 1 << bits - 1
    zero = None
    if symmetric:
        scale = parts.abs().amax(2) / (middle - 1)
    else:
        low, high = parts.amin(2).clamp_max(0), parts.amax(2).clamp_min(0)
        scale = (high - low) / largest
        zero = (-low / scale).nan_to_num(0.0).round().clamp(0, largest).to(torch.uint8)
    return round_weights(weight, scale, zero, bits, size)


def round_weights(
    weight: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int
) -> QuantizedMatrix:
    """Returns weights [O, I] rounded to the nearest codes for these scales and zero points [O, G].

    Weights with scale 0 get the zero point."""
    outputs, inputs = weight.shape
    matrix = QuantizedMatrix(weight.new_empty(0, dtype=torch.uint8), scale, zero, bits, group)
    padded = weight.new_zeros(outputs, scale.shape[1] * group, dtype=scale.dtype)
    padded[:, :inputs] = weight
    parts, largest = padded.view(outputs, -1, group), (1 << bits) - 1
    ratio = (parts / scale.unsqueeze(2)).nan_to_num(0.0, 0.0, 0.0).round()
    codes = (ratio + matrix.zero_or_middle.unsqueeze(2)).clamp(0, largest).to(torch.uint8)
    return replace(matrix, codes=codes.view(outputs, -1)[:, :inputs].contiguous())


AT_ONCE = 1 << 18
"""Number of weights that `quantize_clipped` processes at a time."""
CLIPS = tuple(1 - i / 40 for i in range(19))
"""Candidate clipping ratios, from 1 to 0.55: the share of the largest magnitude that gets the largest code."""


def quantize_clipped(weight: Tensor, bits: int, group: int | None = None) -> QuantizedMatrix:
    """Returns symmetric codes of weights [O, I] whose scales, among those clipped by `CLIPS`, have the least squared
    error.

    The ratio is chosen for each group; weights beyond the clipped range get the largest code. Scales are rounded to
    bfloat16, so that every dtype for weights represents them. A few rows are processed at a time, to keep the
    candidates in the CPU's caches."""
    step = max(1, AT_ONCE // weight.shape[1])
    parts = [_clipped(weight[begin : begin + step], bits, group) for begin in range(0, len(weight), step)]
    codes, scale = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scale"))
    return replace(parts[0], codes=codes, scale=scale)


def _clipped(weight: Tensor, bits: int, group: int | None) -> QuantizedMatrix:
    unclipped = quantize_weights(weight, bits, group)
    size = unclipped.group
    best = torch.full_like(unclipped.scale, torch.inf)
    scale = unclipped.scale
    for clip in CLIPS:
        tried = (clip * unclipped.scale).bfloat16().to(scale.dtype)
        gap = round_weights(weight, tried, None, bits, size).dequantize(scale.dtype) - weight.to(scale.dtype)
        error = torch.nn.functional.pad(gap.square_(), (0, -gap.shape[1] % size))
        error = error.view(*scale.shape, size).sum(2)
        scale, best = torch.where(error < best, tried, scale), torch.minimum(error, best)
    return round_weights(weight, scale, None, bits, size)
