"""NF4: weights in 4 bits, and their scales in 8 (Dettmers et al. 2023, "QLoRA", section 3).

    w  ~  NF4[code] * scale                        one scale for each block of 64 consecutive numbers: the largest |w|
    scale  ~  offset + DYNAMIC[code] * largest     offset: the mean of all scales; one `largest` for each 256 scales

Codes, scales and their order are those of bitsandbytes (`quantize_4bit`, blocks of 64, nf4, compress_statistics): 0.516
bytes a weight.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.native.linear import MOST_ROWS, Matrix, linear, unsupported_reason
from headway.native.nf4 import Nf4Matrix
from headway.nn.weights.base import Weight

BLOCK, SCALES = 64, 256
VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
"""Quantiles of the normal distribution, including 0 (Dettmers et al. 2023, appendix E)."""
TINY = 1e-38  # divisor for a block of zeros, whose scale is 0


@lru_cache
def dynamic_map() -> Tensor:
    """Returns the 256 values of an 8-bit number whose exponent takes as many bits as it needs (Dettmers et al. 2022,
    "8-bit Optimizers via Block-wise Quantization", section 1.3), in ascending order."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        means = 10.0 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values))


@dataclass(frozen=True, eq=False)
class Nf4(Weight):
    """A matrix [O, I] of codes and scales.

        up to 64 rows, float32 or bf16 on a CPU   by the kernels, if I is a multiple of 64
        otherwise, and if gradients are needed    by torch, with the matrix dequantized for each product

    In either case the weights are `dequantize(x.dtype)`, bit for bit, and x is not rounded.

        codes   uint8 [ceil(O I / 2)], two numbers in each, the first in the high bits
        scales  uint8, an index into `dynamic_map` for each block of 64; largest: float32, one for each 256 scales
        offset  float32 scalar
        first   for a part of a matrix: the number of its first block in the whole matrix
        row     for a part of a matrix: the number of blocks in a row of the whole matrix
    """

    name: ClassVar[str] = "nf4"
    codes: Tensor
    scales: Tensor
    largest: Tensor
    offset: Tensor
    size: tuple[int, int]
    first: int = 0
    row: int | None = None

    @classmethod
    def pack(cls, w: Tensor) -> Self:
        """See `Weight`: takes the nearest codes."""
        ratios, scale = _blocks(w.detach().reshape(-1).float(), BLOCK)
        nibbles = _nearest(ratios.flatten()[: w.numel()], torch.tensor(VALUES, device=w.device))
        nibbles = F.pad(nibbles, (0, w.numel() % 2), value=VALUES.index(0.0))
        offset = scale.mean()
        ratios, largest = _blocks(scale - offset, SCALES)
        scales = _nearest(ratios.flatten()[: scale.numel()], dynamic_map().to(w.device))
        return cls((nibbles[::2] << 4) | nibbles[1::2], scales, largest, offset, (w.shape[0], w.shape[1]))

    @property
    def shape(self) -> tuple[int, int]:
        """See `Weight`."""
        return self.size

    def tensors(self) -> dict[str, Tensor]:
        """See `Weight`. If rows are whole blocks, codes and scales have one row for each of them, so that rows can
        be taken."""
        rows = (self.size[0], -1) if self.size[1] % BLOCK == 0 else (-1,)
        sizes = torch.cat((self.largest, self.offset[None]))
        return {"codes": self.codes.view(rows), "scales": self.scales.view(rows), "sizes": sizes}

    def with_tensors(self, tensors: dict[str, Tensor]) -> Self:
        """See `Weight`."""
        sizes = tensors["sizes"]
        return replace(
            self, codes=tensors["codes"], scales=tensors["scales"], largest=sizes[:-1], offset=sizes[-1]
        )

    def scale(self) -> Tensor:
        """Returns the scale of each block, float32."""
        values = dynamic_map().to(self.scales.device)[self.scales.flatten().int()]
        if self.row is None:
            largest = self.largest.repeat_interleave(SCALES)[: len(values)]
        else:
            # scales share a `largest` by their block numbers in the whole matrix: first + i row + j for block (i, j)
            rows, columns = self.size[0], self.size[1] // BLOCK
            at = self.first + torch.arange(rows)[:, None] * self.row + torch.arange(columns)
            largest = self.largest[at.flatten().to(values.device) // SCALES]
        return values * largest + self.offset

    def part_reason(self, axis: int, rows: range) -> str | None:
        """See `Weight`. Rows and columns must be whole blocks."""
        columns = len(rows) if axis else self.size[1]
        if self.row is None and self.size[1] % BLOCK == columns % BLOCK == 0:
            return None
        return (
            f"has weights in nf4 in blocks of {BLOCK} numbers, but {columns} inputs per process are not a multiple of "
            f"{BLOCK}; leave base out, so that they are in bf16"
        )

    def part(self, axis: int, rows: range) -> Self:
        """See `Weight`: part of a whole matrix, bit for bit."""
        outputs, inputs = self.size

        def cut(flat: Tensor) -> Tensor:
            by_row = flat.view(outputs, -1)
            inputs_each = 1 if axis == 0 else inputs // by_row.shape[1]
            part = by_row.narrow(axis, rows.start // inputs_each, len(rows) // inputs_each)
            return part.clone(memory_format=torch.contiguous_format)

        blocks = inputs // BLOCK
        first = rows.start * blocks if axis == 0 else rows.start // BLOCK
        size = (len(rows), inputs) if axis == 0 else (outputs, len(rows))
        return type(self)(cut(self.codes), cut(self.scales), self.largest, self.offset, size, first, blocks)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """See `Weight`: computed in float32 and rounded to `dtype`."""
        count = self.size[0] * self.size[1]
        # a byte is looked up as the pair of numbers that it holds
        values = torch.tensor(VALUES, device=self.codes.device)
        pairs = torch.stack((values.repeat_interleave(16), values.repeat(16)), 1)
        flat = F.embedding(self.codes.int(), pairs).flatten()[:count]
        whole = count - count % BLOCK
        scale = self.scale()
        flat[:whole].view(-1, BLOCK).mul_(scale[: whole // BLOCK, None])
        flat[whole:].mul_(scale[whole // BLOCK :])
        return flat.view(self.size).to(dtype or torch.float32)

    def fast_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Weight`: products of a few rows run on the kernels if possible."""
        if 0 < x.numel() <= MOST_ROWS * self.size[1] and unsupported_reason(x, []) is None:
            matrix = self.native()
            if not isinstance(matrix, str):
                return linear(x, [matrix], [None if bias is None else bias.detach().float()])[0]
        return super().fast_product(x, bias)

    def native(self) -> Matrix | str:
        """See `Weight`: its own tensors, if rows are whole blocks."""
        if self.size[1] % BLOCK:
            return f"the kernels need nf4 weights with a multiple of {BLOCK} inputs, got {self.size[1]}"
        codes, scales = (t.view(self.size[0], -1) for t in (self.codes, self.scales))
        return Nf4Matrix(
            codes, scales, _values(), dynamic_map(), self.largest, float(self.offset), self.first, self.row
        )


@lru_cache
def _values() -> Tensor:
    return torch.tensor(VALUES)


def nf4_bytes(numbers: int) -> int:
    """Returns the bytes of a matrix with this many numbers: codes, a scale for each 64, a `largest` for each 256
    scales, an offset."""
    scales = -(-numbers // BLOCK)
    return -(-numbers // 2) + scales + 4 * -(-scales // SCALES) + 4


def _blocks(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Returns (x / the largest |x| of its block [blocks, size], and these largest); the last block is padded with
    zeros."""
    blocks = F.pad(x, (0, -len(x) % size)).view(-1, size)
    largest = blocks.abs().amax(1)
    return (blocks * (1 / largest.clamp_min(TINY))[:, None]).clamp(-1, 1), largest


def _nearest(x: Tensor, values: Tensor) -> Tensor:
    """Returns the index of the nearest of the ascending `values`, uint8."""
    return torch.bucketize(x, (values[:-1] + values[1:]) / 2, out_int32=True).to(torch.uint8)
