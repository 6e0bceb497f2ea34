"""Attention dropout whose keep bit is a pure function of its place.

keep(seed, b, h, t, s) depends only on the batch row, the query head, the query slot and the global key slot, and on
neither tiling nor the split of keys into sets. Therefore attention with dropout still merges, and the backward
recomputes the bits instead of storing them.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """Applies a bijection of 32-bit words with good avalanche ("lowbias32", C. Wellons, hash-prospector), in int64."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def keep_scale(
    seed: int,
    probability: float,
    rows: Tensor,
    heads: Tensor,
    queries: Tensor,
    keys: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the factor of each weight: 1 / (1 - p) if it is kept, 0 if it is dropped; [B, H, T, S].

    The arguments `rows` [B], `heads` [H], `queries` [B|1, T] and `keys` [B|1, S] are int64 coordinates.
    """
    low, high = seed & _MASK, (seed >> 32) & _MASK
    word = _mix(rows ^ low).view(-1, 1) * 1
    word = _mix((word ^ heads.view(1, -1)) + high & _MASK)
    word = _mix((word.unsqueeze(-1) + queries.unsqueeze(1) * 0x9E3779B1) & _MASK)
    word = _mix((word.unsqueeze(-1) ^ _mix(keys & _MASK).unsqueeze(1).unsqueeze(1)) & _MASK)
    threshold = int(probability * 2**32)
    return (word >= threshold).to(dtype) / (1.0 - probability)
