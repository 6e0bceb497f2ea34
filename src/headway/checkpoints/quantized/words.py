"""Codes in words of 32 bits, as checkpoints hold them."""

from __future__ import annotations

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of eight codes, the one whose bits are at each place of a word, from the lowest (AutoAWQ, `pack_intweight`)."""


def to_words(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [R, C] as int32 [R, ceil(C bits / 32)]: the first of a word in its lowest bits, zeros behind the
    last."""
    each = 32 // bits
    rows, columns = codes.shape
    padded = codes.new_zeros(rows, -(-columns // each) * each)
    padded[:, :columns] = codes
    if bits == 4:
        padded = padded[:, ::2] | padded[:, 1::2] << 4
    return padded.contiguous().view(torch.int32)  # little-endian, as safetensors files are


def from_words(words: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse: uint8 [R, columns]."""
    found = words.contiguous().view(torch.uint8)
    if bits == 4:
        found = torch.stack((found & 15, found >> 4), 2).flatten(1)
    return found[:, :columns].contiguous()
