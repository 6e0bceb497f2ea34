"""Numbers of few bits: keys and values as int8 with one scale for each token and kv head, weights of 8 or 4 bits.

Keys and values:

    scale = max |x| / 127        q = round(x / scale)        x' = scale q        |x - x'| <= scale / 2

(Symmetric rounding to the nearest, ties to even; per token as in Sheng et al. 2023, "FlexGen", there with groups.)

A row of zeros has scale 0. A row with a NaN or an infinity has a scale that is no number, and reads as NaN
throughout: the fault is seen by whoever sees the row, and by no one else. Rows whose largest number is below
127 * 2^-126 lose digits to the scale, as float32 does there.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LARGEST = 127
SCALE_BYTES = 4


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [..., D] as (int8 [..., D], scale float32 [...])."""
    scale = x.abs().amax(-1).float() / LARGEST
    ratio = (x.float() / scale.unsqueeze(-1)).nan_to_num(0.0, 0.0, 0.0)
    return ratio.round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """scale q [..., D]: the product in float32, rounded to `dtype`."""
    return (q.float() * scale.unsqueeze(-1)).to(dtype)


def row_bytes(width: int, dtype: torch.dtype) -> int:
    """Bytes of a row of so many numbers as it is stored: in int8 with its scale."""
    return width * dtype.itemsize + SCALE_BYTES * (dtype == torch.int8)


@dataclass(frozen=True)
class QuantizedMatrix:
    """Weights [O, I] in groups of inputs that share a scale: w' = scale (code - zero).

    Attributes:
        codes: uint8 [O, I], each in 0 .. 2^bits - 1.
        scale: [O, G]; G = 1 is one scale for each row, else group g holds inputs g * group to (g + 1) * group - 1.
        zero: uint8 [O, G], the code of 0; None is the middle, 2^(bits - 1).
        bits: 8 or 4.
        group: inputs of a group.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    group: int

    @property
    def zero_or_middle(self) -> Tensor:
        """The codes of 0, [O, G]."""
        middle = 1 << self.bits - 1
        return (
            self.scale.new_full(self.scale.shape, middle, dtype=torch.uint8)
            if self.zero is None
            else self.zero
        )

    def moved(self, move: Callable[[Tensor], Tensor]) -> "QuantizedMatrix":
        """The matrix whose outputs are those that `move` makes of tensors [O, ..]."""
        zero = None if self.zero is None else move(self.zero)
        return replace(self, codes=move(self.codes), scale=move(self.scale), zero=zero)

    def part(self, axis: int, rows: range) -> "QuantizedMatrix":
        """Some outputs (axis 0), or some inputs (axis 1) that are whole groups or lie in the one group of a row."""
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
        """w' [O, I]: the product in float32, rounded to `dtype`."""
        inputs = self.codes.shape[1]
        scale, zero = (
            t.float().repeat_interleave(self.group, 1)[:, :inputs] for t in (self.scale, self.zero_or_middle)
        )
        return (scale * (self.codes.float() - zero)).to(dtype)


def quantize_weights(
    weight: Tensor, bits: int, group: int | None = None, *, symmetric: bool = True
) -> QuantizedMatrix:
    """Weights [O, I] rounded to the nearest code; `group` inputs share a scale, or the whole row.

        symmetric     scale = max |w| / (2^(bits - 1) - 1)
        else          scale = (max(w, 0) - min(w, 0)) / (2^bits - 1), zero = round(-min / scale)

    Raises ValueError for bits other than 8 and 4."""
    if bits not in (4, 8):
        raise ValueError(f"weights are quantized to 8 or 4 bits, not to {bits}")
    outputs, inputs = weight.shape
    each = min(group or inputs, inputs)
    groups = -(-inputs // each)
    padded = weight.new_zeros(outputs, groups * each, dtype=torch.float32)
    padded[:, :inputs] = weight
    parts = padded.view(outputs, groups, each)
    most, middle = (1 << bits) - 1, 1 << bits - 1
    zero = None
    if symmetric:
        scale = parts.abs().amax(2) / (middle - 1)
    else:
        low, high = parts.amin(2).clamp_max(0), parts.amax(2).clamp_min(0)
        scale = (high - low) / most
        zero = (-low / scale).nan_to_num(0.0).round().clamp(0, most).to(torch.uint8)
    return round_weights(weight, scale, zero, bits, each)


def round_weights(
    weight: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int
) -> QuantizedMatrix:
    """Weights [O, I] at the nearest codes of given scales and zeros [O, G]; where a scale is 0, the code of 0."""
    outputs, inputs = weight.shape
    matrix = QuantizedMatrix(weight.new_empty(0, dtype=torch.uint8), scale, zero, bits, group)
    padded = weight.new_zeros(outputs, scale.shape[1] * group, dtype=scale.dtype)
    padded[:, :inputs] = weight
    parts, most = padded.view(outputs, -1, group), (1 << bits) - 1
    ratio = (parts / scale.unsqueeze(2)).nan_to_num(0.0, 0.0, 0.0).round()
    codes = (ratio + matrix.zero_or_middle.unsqueeze(2)).clamp(0, most).to(torch.uint8)
    return replace(matrix, codes=codes.view(outputs, -1)[:, :inputs].contiguous())


AT_ONCE = 1 << 18
"""Weights that are tried at a time."""
CLIPS = tuple(1 - i / 40 for i in range(19))
"""Shares of the largest weight that may get the largest code, from 1 to 0.55."""


def quantize_clipped(weight: Tensor, bits: int, group: int | None = None) -> QuantizedMatrix:
    """Symmetric codes of weights [O, I] with the scale, of `CLIPS` times that of the largest weight, whose squared
    error is least in its group; weights beyond it get the largest code.

    Scales are numbers of bfloat16, so that any dtype that weights are stored in holds them. Rows are independent, and
    done a few at a time, so that what is tried stays in the caches."""
    step = max(1, AT_ONCE // weight.shape[1])
    parts = [_clipped(weight[at : at + step], bits, group) for at in range(0, len(weight), step)]
    codes, scale = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scale"))
    return replace(parts[0], codes=codes, scale=scale)


def _clipped(weight: Tensor, bits: int, group: int | None) -> QuantizedMatrix:
    first = quantize_weights(weight, bits, group)
    each = first.group
    best = torch.full_like(first.scale, torch.inf)
    scale = first.scale
    for clip in CLIPS:
        tried = (clip * first.scale).bfloat16().to(scale.dtype)
        gap = round_weights(weight, tried, None, bits, each).dequantize(scale.dtype) - weight.to(scale.dtype)
        error = torch.nn.functional.pad(gap.square_(), (0, -gap.shape[1] % each))
        error = error.view(*scale.shape, each).sum(2)
        scale, best = torch.where(error < best, tried, scale), torch.minimum(error, best)
    return round_weights(weight, scale, None, bits, each)
