"""GGUF's tensor types: how numbers are packed into blocks, and the conversion both ways.

Rows are split into blocks of 32 numbers, or of 256 ("K"), each with its own scale d (float16), some with a minimum m.
In the layouts below, and in `headway.storage.gguf_k_blocks`, bytes are listed from left to right. `q[a:b]` is one byte
for each of the numbers a to b - 1; `q[a:b | c:d]` is one byte for two numbers, the first in its low half. Every product
and sum is rounded to float32, in the order given. (ggml-org/llama.cpp, ggml/src/ggml-common.h and ggml-quants.c;
gguf-py/gguf/quants.py.)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headway.block_quantization import BLOCK, BlockMatrix, CodedMatrix, quantize_blocks
from headway.errors import CheckpointError
from headway.quantization import QuantizedMatrix
from headway.storage.gguf_k_blocks import NBYTES, from_blocks, half, nibbles, to_blocks

SMALL = 32
FP4 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
BITS = {"Q4_K": 4, "Q5_K": 5, "Q6_K": 6}
CODED: Mapping[str, str] = {"Q8_0": "int8", "Q4_0": "int4", "Q4_K": "q4_K", "Q5_K": "q5_K", "Q6_K": "q6_K"}
"""Types whose codes the kernels can multiply directly, and the weight format that holds them
(`headway.nn.weights.WEIGHTS`)."""


@dataclass(frozen=True)
class BlockType:
    """One type of GGUF tensors.

    Attributes:
        name: as llama.cpp prints it.
        number: its number in the file (`ggml_type`).
        block, nbytes: numbers per block, and bytes per block.
        dtype: dtype of the mapped data: the numbers themselves, or uint8 if they are packed.
        unpack: uint8 [blocks, nbytes] -> float32 [blocks, block]; None if numbers are not packed.
        pack: float32 [blocks, block] -> uint8 [blocks, nbytes]; None if numbers are not packed, or the type is
            read-only.
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
        """The dtype of the unpacked numbers, which holds them exactly."""
        return self.dtype if self.unpack is None else torch.float32


def dequantize(raw: Tensor, kind: BlockType) -> Tensor:
    """Returns the numbers [..., N] of rows of blocks, uint8 [..., N / block * nbytes], in float32; numbers that are not
    packed are returned unchanged."""
    if kind.unpack is None:
        return raw
    return kind.unpack(raw.reshape(-1, kind.nbytes)).view(*raw.shape[:-1], -1)


def quantize(values: Tensor, kind: BlockType) -> Tensor:
    """Packs rows of numbers [..., N] into blocks, uint8 [..., N / block * nbytes]; unpacked types only convert the
    dtype.

    Raises CheckpointError for a read-only type, for rows that are not a multiple of its block, and for an infinity or
    NaN, which no block can hold."""
    if kind.unpack is None:
        return values.to(kind.dtype)
    if kind.pack is None:
        raise CheckpointError(
            f"{kind.name} can be read but not written; writable types are {', '.join(WRITTEN)}"
        )
    if values.shape[-1] % kind.block:
        raise CheckpointError(
            f"rows of {values.shape[-1]} numbers cannot be split into {kind.name} blocks of {kind.block}"
        )
    if not values.isfinite().all():
        raise CheckpointError(f"a tensor holds an infinity or NaN, which {kind.name} cannot hold")
    return kind.pack(values.float().reshape(-1, kind.block)).view(*values.shape[:-1], -1)


def codes(raw: Tensor, kind: BlockType) -> CodedMatrix:
    """Returns a matrix of a type in `CODED`, given as uint8 [O, bytes], with unpacked codes and unchanged scales.

    Its numbers are those of `dequantize`. Raises CheckpointError for any other type."""
    if kind.name not in CODED:
        raise CheckpointError(
            f"{kind.name} has no integer codes for matrix products; types with codes are {', '.join(CODED)}"
        )
    if kind.block == BLOCK:
        return from_blocks(raw, BITS[kind.name])
    return _small_codes(raw, 8 if kind.name == "Q8_0" else 4)


def _small_codes(raw: Tensor, bits: int) -> QuantizedMatrix:
    """Unpacks Q8_0: d, int8 q[0:32]:  x = q d
    and Q4_0: d, q[0:16 | 16:32]:  x = d (q - 8)."""
    blocks = raw.reshape(-1, 2 + SMALL * bits // 8)
    # codes are unsigned, with zero point 128: int8 -128 is code 0, 127 is code 255
    q = blocks[:, 2:] ^ 0x80 if bits == 8 else nibbles(blocks[:, 2:], 16)
    scale = half(blocks[:, :2]).view(raw.shape[0], -1)
    return QuantizedMatrix(q.reshape(raw.shape[0], -1), scale, None, bits, SMALL)


def block_type(matrix: CodedMatrix) -> BlockType | None:
    """Returns the type whose blocks can hold a matrix's codes unchanged; None if it has zero points, or if its rows or
    groups are not multiples of 32."""
    if isinstance(matrix, BlockMatrix):
        return next(kind for kind in TYPES if BITS.get(kind.name) == matrix.bits)
    if matrix.zero is not None or matrix.codes.shape[1] % SMALL or matrix.group % SMALL:
        return None
    return Q8_0 if matrix.bits == 8 else Q4_0


def blocks(matrix: CodedMatrix) -> Tensor:
    """Packs a matrix that has a `block_type`, the inverse of `codes`: uint8 [O, bytes], with scales rounded to float16.

    Raises CheckpointError for a scale beyond float16's range."""
    if isinstance(matrix, BlockMatrix):
        return to_blocks(matrix)
    outputs, inputs = matrix.codes.shape
    scale = matrix.scale.repeat_interleave(matrix.group // SMALL, 1)[:, : inputs // SMALL].half()
    if not scale.isfinite().all():
        raise CheckpointError(
            f"a scale of {float(matrix.scale.abs().max()):.3g} is above {torch.finfo(torch.float16).max:.0f}, the "
            "largest that a block can store (float16); convert the model with dtype=torch.float32"
        )
    q = matrix.codes.reshape(-1, SMALL)
    q = q ^ 0x80 if matrix.bits == 8 else q[:, :16] | q[:, 16:] << 4
    return torch.cat((scale.reshape(-1, 1).view(torch.uint8), q), 1).view(outputs, -1)


def _unpacked(raw: Tensor, bits: int, *, minimum: bool) -> Tensor:
    """Unpacks blocks of d, then m if `minimum`, then the codes' fifth bits h in 4 bytes if `bits` is 5, then q[0:16 |
    16:32]:

    x = d (q + 16 h) + m, without m (Q5_0 only)  x = d (q + 16 h - 16)
    """
    d, q = half(raw[:, :2]).float(), nibbles(raw[:, -16:], 16)
    if bits == 5:
        q = q | (raw[:, -20:-16].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1) << 4
    return d * q.float() + half(raw[:, 2:4]).float() if minimum else d * (q.float() - 16)


def _mxfp4(raw: Tensor) -> Tensor:
    """Unpacks e, q[0:16 | 16:32], where q has a sign in bit 3 and an index of `FP4`, twice the values of E2M1, in bits
    0 to 2: x = FP4[q] 2^(e - 128). (OCP Microscaling Formats 1.0, 2023, section 5.3.)"""
    e = raw[:, :1].int()  # bits of 2^(e - 128): exponent field e - 1; 2^-128 and 2^-127 are subnormal
    power = torch.where(e < 2, 1 << 21 << e, (e - 1) << 23).view(torch.float32)
    return torch.tensor([*FP4, *(0.0 - q for q in FP4)])[nibbles(raw[:, 1:], 16).long()] * power


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d == 0, 0.0, 1 / d)


def _bytes(d: Tensor) -> Tensor:
    return d.half().view(torch.uint8)


def _to_q8_0(x: Tensor) -> Tensor:
    """Packs with d = max |x| / 127 and q = x / d, rounded to nearest, halves away from 0."""
    d = x.abs().amax(1, keepdim=True) / 127
    ratio = x * _inverse(d)
    magnitude = ratio.abs()
    whole = magnitude.floor()
    q = ratio.sign() * (whole + (2 * (magnitude - whole)).floor())  # 2.5: 2 + floor(2 * 0.5) = 3
    return torch.cat((_bytes(d), q.to(torch.int8).view(torch.uint8)), 1)


def _to_q4_0(x: Tensor) -> Tensor:
    """Packs with d = -x / 8 for the x of largest magnitude (the first if tied) and q = x / d + 8, rounded to nearest,
    at most 15."""
    d = x.gather(1, x.abs().argmax(1, keepdim=True)) / -8
    q = (x * _inverse(d) + 8.5).trunc().clamp(0, 15).to(torch.uint8)
    return torch.cat((_bytes(d), q[:, :16] | q[:, 16:] << 4), 1)


def _of_blocks(name: str, number: int) -> BlockType:
    bits = BITS[name]
    return BlockType(
        name,
        number,
        BLOCK,
        NBYTES[bits],
        unpack=lambda raw: from_blocks(raw, bits).dequantize(),
        pack=lambda x: to_blocks(quantize_blocks(x, bits)),
    )


F32 = BlockType("F32", 0, 1, 4, torch.float32)
F16 = BlockType("F16", 1, 1, 2, torch.float16)
BF16 = BlockType("BF16", 30, 1, 2, torch.bfloat16)
Q8_0 = BlockType("Q8_0", 8, SMALL, 34, unpack=lambda raw: _small_codes(raw, 8).dequantize(), pack=_to_q8_0)
Q4_0 = BlockType("Q4_0", 2, SMALL, 18, unpack=lambda raw: _small_codes(raw, 4).dequantize(), pack=_to_q4_0)
TYPES = (
    F32,
    F16,
    BF16,
    Q8_0,
    Q4_0,
    BlockType("Q4_1", 3, SMALL, 20, unpack=partial(_unpacked, bits=4, minimum=True)),
    BlockType("Q5_0", 6, SMALL, 22, unpack=partial(_unpacked, bits=5, minimum=False)),
    BlockType("Q5_1", 7, SMALL, 24, unpack=partial(_unpacked, bits=5, minimum=True)),
    _of_blocks("Q4_K", 12),
    _of_blocks("Q5_K", 13),
    _of_blocks("Q6_K", 14),
    BlockType("MXFP4", 39, SMALL, 17, unpack=_mxfp4),
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
    40: "NVFP4",
}
"""Names of known types that cannot be read, by number."""
