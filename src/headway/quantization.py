"""Keys and values as int8, with one scale for each token and kv head.

    scale = max |x| / 127        q = round(x / scale)        x' = scale q        |x - x'| <= scale / 2

(Symmetric rounding to the nearest, ties to even; per token as in Sheng et al. 2023, "FlexGen", there with groups.)

A row of zeros has scale 0. A row with a NaN or an infinity has a scale that is no number, and reads as NaN
throughout: the fault is seen by whoever sees the row, and by no one else. Rows whose largest number is below
127 * 2^-126 lose digits to the scale, as float32 does there.
"""

from __future__ import annotations

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
