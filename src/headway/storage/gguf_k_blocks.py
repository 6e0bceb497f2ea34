"""GGUF's blocks of 256 numbers ("K") as `BlockMatrix`, and back; layouts are written as in
`headway.storage.gguf_blocks`.

    Q4_K    d, dmin, 12 bytes of s and t, then four times q[0:32 | 32:64]
    Q5_K    d, dmin, 12 bytes of s and t, 32 bytes whose bit i is the fifth bit of sub-block i, then as in Q4_K
    Q6_K    twice q[0:64 | 64:128] (low 4 bits), twice 32 bytes whose bits 2 i, 2 i + 1 are the high bits of run i of
            four (of 32 numbers each), int8 s of 16 sub-blocks, d

s and t of the eight sub-blocks are 6 bits each, packed in bytes a, b, c of 4 each:

    s[0:4] = a & 63    s[4:8] = c & 15 | a >> 6 << 4    t[0:4] = b & 63    t[4:8] = c >> 4 | b >> 6 << 4
"""

import torch
from torch import Tensor

from headway.block_quantization import BLOCK, PARTS, BlockMatrix

NBYTES = {4: 144, 5: 176, 6: 210}
"""Bytes of a block, by the bits of its codes."""


def half(raw: Tensor) -> Tensor:
    """Returns bytes [blocks, 2] as float16 [blocks, 1]."""
    return raw.clone().view(torch.float16)


def bits_of(raw: Tensor, part: int, shifts: range, mask: int) -> Tensor:
    """Extracts bits of bytes [blocks, n], taken `part` bytes at a time, each part once per shift: [blocks, n / part *
    shifts, part]."""
    shifted = raw.reshape(len(raw), -1, 1, part) >> torch.tensor([*shifts], dtype=torch.uint8).view(-1, 1)
    return (shifted & mask).flatten(1, 2)


def nibbles(raw: Tensor, part: int) -> Tensor:
    """Returns the low and then the high halves of every `part` bytes: [blocks, 2 n]. 0x21 0x43 with part 2 gives 1 3 2
    4."""
    return bits_of(raw, part, range(0, 8, 4), 0x0F).flatten(1)


def from_blocks(raw: Tensor, bits: int) -> BlockMatrix:
    """Unpacks rows of blocks, uint8 [O, I / 256 * bytes], into codes and scales."""
    blocks, rows = raw.reshape(-1, NBYTES[bits]), raw.shape[0]

    def of_rows(t: Tensor) -> Tensor:
        return t.reshape(rows, -1)

    if bits == 6:
        q = nibbles(blocks[:, :128], 64) | bits_of(blocks[:, 128:192], 32, range(0, 8, 2), 3).flatten(1) << 4
        scale = blocks[:, 192:208].contiguous().view(torch.int8)
        return BlockMatrix(of_rows(q), of_rows(scale), None, of_rows(half(blocks[:, 208:])), None, bits)
    d, dmin = (half(blocks[:, at : at + 2]) for at in (0, 2))
    a, b, c = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scale = torch.cat((a & 63, c & 15 | a >> 6 << 4), 1)
    low = torch.cat((b & 63, c >> 4 | b >> 6 << 4), 1)
    q = nibbles(blocks[:, -128:], 32)
    if bits == 5:
        q = q | bits_of(blocks[:, 16:48], 32, range(8), 1).flatten(1) << 4
    return BlockMatrix(of_rows(q), of_rows(scale), of_rows(low), of_rows(d), of_rows(dmin), bits)


def to_blocks(matrix: BlockMatrix) -> Tensor:
    """Packs a matrix into rows of blocks, uint8 [O, I / 256 * bytes]: the inverse of `from_blocks`."""
    q = matrix.codes.view(-1, BLOCK)
    d = matrix.d.reshape(-1, 1).view(torch.uint8)
    if matrix.low is None or matrix.dmin is None:
        low = _together(q & 15, 64, 4)
        parts = [low, _together(q >> 4, 32, 2), matrix.scale.view(-1, BLOCK // PARTS[6]).view(torch.uint8), d]
    else:
        s, t = matrix.scale.view(-1, 8), matrix.low.view(-1, 8)
        a, b = (x[:, :4] | x[:, 4:] >> 4 << 6 for x in (s, t))
        parts = [d, matrix.dmin.reshape(-1, 1).view(torch.uint8), a, b, s[:, 4:] & 15 | t[:, 4:] << 4]
        parts += [_together(q >> 4, 32, 1)] if matrix.bits == 5 else []
        parts.append(_together(q & 15, 32, 4))
    return torch.cat(parts, 1).view(len(matrix.codes), -1)


def _together(q: Tensor, part: int, bits: int) -> Tensor:
    """Packs codes of `bits` bits, several parts into the bytes of one: the inverse of `bits_of`."""
    parts = q.view(len(q), -1, 8 // bits, part)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1)
    return (parts << shifts).sum(2, dtype=torch.uint8).flatten(1)
