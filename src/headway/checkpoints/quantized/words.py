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
    packed = found = words.contiguous().view(torch.uint8)
    if bits == 4:
        found = packed.new_empty(len(packed), 2 * packed.shape[1])
        torch.bitwise_and(packed, 15, out=found[:, ::2])
        torch.bitwise_right_shift(packed, 4, out=found[:, 1::2])
    return found[:, :columns].contiguous()
