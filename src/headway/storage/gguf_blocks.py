"""The types of GGUF's tensors: how their numbers are packed into blocks, and what they are.

Rows are cut into blocks of 32 numbers, or of 256 ("K"), each with its own scale d (float16), some with a minimum m. In
the layouts below bytes stand from left to right. `q[a:b]` is a byte for each of the numbers a to b - 1; `q[a:b | c:d]`
is a byte for two, the first in its low half. Products and sums are rounded to float32 one by one, in the order given.
(ggml-org/llama.cpp, ggml/src/ggml-common.h and ggml-quants.c; gguf-py/gguf/quants.py.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.errors import CheckpointError
from headway.quantization import QuantizedMatrix

SMALL, LARGE = 32, 256
CODED: Mapping[str, int] = {"Q8_0": 8, "Q4_0": 4}
"""Types whose codes products may take, and their bits."""


@dataclass(frozen=True)
class BlockType:
    """One type of a tensor.

    Attributes:
        name: as llama.cpp prints it.
        number: in the file (`ggml_type`).
        block, nbytes: numbers of a block, and its bytes.
        dtype: of what is mapped: the numbers themselves, or uint8 where they are packed.
        unpack: uint8 [blocks, nbytes] -> float32 [blocks, block]; None where nothing is packed.
        pack: float32 [blocks, block] -> uint8 [blocks, nbytes]; None where it is only read.
    """

    name: str
    number: int
    block: int
    nbytes: int
    dtype: torch.dtype = torch.uint8
    unpack: Callable[[Tensor], Tensor] | None = None
    pack: Callable[[Tensor], Tensor] | None = None

    @property
    def given_as(self) -> torch.dtype:
        """The dtype that holds its numbers exactly."""
        return self.dtype if self.unpack is None else torch.float32


def dequantize(raw: Tensor, kind: BlockType) -> Tensor:
    """The numbers [..., N] of rows of blocks, uint8 [..., N / block * nbytes], in float32; numbers that are not packed
    stay as they are."""
    if kind.unpack is None:
        return raw
    return kind.unpack(raw.reshape(-1, kind.nbytes)).view(*raw.shape[:-1], -1)


def quantize(values: Tensor, kind: BlockType) -> Tensor:
    """Rows of numbers [..., N] as blocks, uint8 [..., N / block * nbytes]; in the type's dtype where it packs nothing.

    Raises CheckpointError for a type that is read only, for rows that are no multiples of its block, and for an
    infinity or NaN, which no block holds."""
    if kind.unpack is None:
        return values.to(kind.dtype)
    if kind.pack is None:
        raise CheckpointError(f"{kind.name} is read, and not written; written are {', '.join(WRITTEN)}")
    if values.shape[-1] % kind.block:
        raise CheckpointError(
            f"rows of {values.shape[-1]} numbers are no multiple of the {kind.block} of a {kind.name} block"
        )
    if not values.isfinite().all():
        raise CheckpointError(f"a tensor holds an infinity or NaN, which {kind.name} cannot hold")
    return kind.pack(values.float().reshape(-1, kind.block)).view(*values.shape[:-1], -1)


def codes(raw: Tensor, kind: BlockType) -> QuantizedMatrix:
    """A matrix of Q8_0 or Q4_0, uint8 [O, bytes], with its codes unpacked and its scales as they are: its numbers are
    those of `dequantize`, and products may take the codes. Raises CheckpointError for another type."""
    if kind.name not in CODED:
        raise CheckpointError(f"{kind.name} has no codes with one scale and no minimum; Q8_0 and Q4_0 have")
    blocks = raw.reshape(-1, kind.nbytes)
    q = blocks[:, 2:]
    unpacked, bits = (q ^ 0x80, 8) if kind.name == "Q8_0" else (_nibbles(q, SMALL).flatten(1), 4)
    scale = _half(blocks[:, :2]).view(raw.shape[0], -1)
    return QuantizedMatrix(unpacked.reshape(raw.shape[0], -1), scale, None, bits, SMALL)


def block_type(matrix: QuantizedMatrix) -> BlockType | None:
    """The type whose blocks hold a matrix's codes as they are; None for codes with zeros of their own, and for rows and
    groups that are no multiples of 32."""
    if matrix.zero is not None or matrix.codes.shape[1] % SMALL or matrix.group % SMALL:
        return None
    return Q8_0 if matrix.bits == 8 else Q4_0


def blocks(matrix: QuantizedMatrix) -> Tensor:
    """The inverse of `codes`, for a matrix that has a `block_type`: uint8 [O, bytes], its scales rounded to float16.

    Raises CheckpointError for a scale that float16 does not hold."""
    outputs, inputs = matrix.codes.shape
    scale = matrix.scale.repeat_interleave(matrix.group // SMALL, 1)[:, : inputs // SMALL].half()
    if not scale.isfinite().all():
        raise CheckpointError(
            f"a scale of {float(matrix.scale.abs().max()):.3g} is beyond {torch.finfo(torch.float16).max:.0f}, the "
            "largest of a block: convert the model with dtype=torch.float32"
        )
    q = matrix.codes.reshape(-1, SMALL)
    q = q ^ 0x80 if matrix.bits == 8 else q[:, :16] | q[:, 16:] << 4
    return torch.cat((scale.reshape(-1, 1).view(torch.uint8), q), 1).view(outputs, -1)


def _half(raw: Tensor) -> Tensor:
    """Bytes [blocks, 2] as float16 [blocks, 1]."""
    return raw.clone().view(torch.float16)


def _bits(raw: Tensor, part: int, shifts: range, mask: int) -> Tensor:
    """Bits of bytes [blocks, n], `part` bytes at a time, each part once a shift: [blocks, n / part * shifts, part]."""
    each = raw.view(len(raw), -1, 1, part) >> torch.tensor([*shifts], dtype=torch.uint8).view(-1, 1)
    return (each & mask).flatten(1, 2)


def _nibbles(raw: Tensor, block: int) -> Tensor:
    """Low and then high halves of bytes, of each 16 of them (32 in blocks of 256)."""
    return _bits(raw, 16 if block == SMALL else 32, range(0, 8, 4), 0x0F)


def _fifth(raw: Tensor) -> Tensor:
    """The bits of 4 bytes, lowest first, each as a fifth bit: [blocks, 32]."""
    return (raw.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1) << 4


def _q8_0(raw: Tensor) -> Tensor:
    """d, int8 q[0:32]:  x = q d"""
    return raw[:, 2:].view(torch.int8).float() * _half(raw[:, :2]).float()


def _q4_0(raw: Tensor) -> Tensor:
    """d, q[0:16 | 16:32]:  x = d (q - 8)"""
    return _half(raw[:, :2]).float() * (_nibbles(raw[:, 2:], SMALL).flatten(1).float() - 8)


def _q4_1(raw: Tensor) -> Tensor:
    """d, m, q[0:16 | 16:32]:  x = d q + m"""
    d, m = (_half(raw[:, at : at + 2]).float() for at in (0, 2))
    return d * _nibbles(raw[:, 4:], SMALL).flatten(1).float() + m


def _q5_0(raw: Tensor) -> Tensor:
    """d, fifth bits h of q in 4 bytes, q[0:16 | 16:32]:  x = d (q + 16 h - 16)"""
    q = _nibbles(raw[:, 6:], SMALL).flatten(1) | _fifth(raw[:, 2:6])
    return _half(raw[:, :2]).float() * (q.float() - 16)


def _q5_1(raw: Tensor) -> Tensor:
    """d, m, fifth bits h of q in 4 bytes, q[0:16 | 16:32]:  x = d (q + 16 h) + m"""
    d, m = (_half(raw[:, at : at + 2]).float() for at in (0, 2))
    return d * (_nibbles(raw[:, 8:], SMALL).flatten(1) | _fifth(raw[:, 4:8])).float() + m


def _scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """6-bit scales s and minimums t of eight parts, from bytes a b c of 4 each:

    s[0:4] = a & 63    s[4:8] = c & 15 | a >> 6 << 4    t[0:4] = b & 63    t[4:8] = c >> 4 | b >> 6 << 4
    """
    a, b, c = raw.view(-1, 3, 4).unbind(1)
    s = torch.cat((a & 63, c & 15 | a >> 6 << 4), 1)
    return s.float(), torch.cat((b & 63, c >> 4 | b >> 6 << 4), 1).float()


def _parts(raw: Tensor, q: Tensor) -> Tensor:
    """x = (d s) q - (dmin t) for eight parts of 32, from d, dmin and 12 bytes of `_scales`."""
    d, dmin = (_half(raw[:, at : at + 2]).float() for at in (0, 2))
    s, t = _scales(raw[:, 4:16].contiguous())
    return ((d * s).unsqueeze(2) * q.float() - (dmin * t).unsqueeze(2)).flatten(1)


def _q4_k(raw: Tensor) -> Tensor:
    """d, dmin, 12 bytes of scales, then four times q[0:32 | 32:64]"""
    return _parts(raw, _nibbles(raw[:, 16:].contiguous(), LARGE))


def _q5_k(raw: Tensor) -> Tensor:
    """d, dmin, 12 bytes of scales, 32 bytes whose bit i is the fifth bit of part i, then four times q[0:32 | 32:64]"""
    fifth = _bits(raw[:, 16:48].contiguous(), 32, range(8), 1) << 4
    return _parts(raw, _nibbles(raw[:, 48:].contiguous(), LARGE) | fifth)


def _q6_k(raw: Tensor) -> Tensor:
    """Twice q[0:64 | 64:128] (low 4 bits), twice 32 bytes whose bits 2 i, 2 i + 1 are the high bits of part i of four,
    int8 s of 16 parts of 16, d:  x = (d s) (q - 32)"""
    low = _bits(raw[:, :128].contiguous(), 64, range(0, 8, 4), 0x0F).view(-1, 8, 32)
    high = _bits(raw[:, 128:192].contiguous(), 32, range(0, 8, 2), 3)
    scale = _half(raw[:, 208:]).float() * raw[:, 192:208].contiguous().view(torch.int8).float()
    return (scale.unsqueeze(2) * ((low | high << 4).view(-1, 16, 16).float() - 32)).flatten(1)


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d == 0, 0.0, 1 / d)


def _bytes(d: Tensor) -> Tensor:
    return d.half().view(torch.uint8)


def _to_q8_0(x: Tensor) -> Tensor:
    """d = max |x| / 127, q = x / d rounded to the nearest, halves away from 0."""
    d = x.abs().amax(1, keepdim=True) / 127
    ratio = x * _inverse(d)
    size = ratio.abs()
    whole = size.floor()
    q = ratio.sign() * (whole + (2 * (size - whole)).floor())
    return torch.cat((_bytes(d), q.to(torch.int8).view(torch.uint8)), 1)


def _to_q4_0(x: Tensor) -> Tensor:
    """d = -x / 8 of the x that is largest in size (the first of several), q = x / d + 8 rounded to the nearest, at most
    15."""
    d = x.gather(1, x.abs().argmax(1, keepdim=True)) / -8
    q = (x * _inverse(d) + 8.5).trunc().clamp(0, 15).to(torch.uint8)
    return torch.cat((_bytes(d), q[:, :16] | q[:, 16:] << 4), 1)


F32 = BlockType("F32", 0, 1, 4, torch.float32)
F16 = BlockType("F16", 1, 1, 2, torch.float16)
BF16 = BlockType("BF16", 30, 1, 2, torch.bfloat16)
Q8_0 = BlockType("Q8_0", 8, SMALL, 34, unpack=_q8_0, pack=_to_q8_0)
Q4_0 = BlockType("Q4_0", 2, SMALL, 18, unpack=_q4_0, pack=_to_q4_0)
TYPES = (
    F32,
    F16,
    BF16,
    Q8_0,
    Q4_0,
    BlockType("Q4_1", 3, SMALL, 20, unpack=_q4_1),
    BlockType("Q5_0", 6, SMALL, 22, unpack=_q5_0),
    BlockType("Q5_1", 7, SMALL, 24, unpack=_q5_1),
    BlockType("Q4_K", 12, LARGE, 144, unpack=_q4_k),
    BlockType("Q5_K", 13, LARGE, 176, unpack=_q5_k),
    BlockType("Q6_K", 14, LARGE, 210, unpack=_q6_k),
)
BY_NUMBER: Mapping[int, BlockType] = {kind.number: kind for kind in TYPES}
BY_DTYPE: Mapping[torch.dtype, BlockType] = {kind.dtype: kind for kind in (F32, F16, BF16)}
WRITTEN = tuple(kind.name for kind in TYPES if kind.unpack is None or kind.pack is not None)
UNSUPPORTED: Mapping[int, str] = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
"""Types that are known and not read."""
