"""NF4: weights in 4 bits, and their scales in 8 (Dettmers et al. 2023, "QLoRA", section 3).

    w  ~  NF4[code] * scale                        a scale for each block of 64 numbers in a row: the largest |w|
    scale  ~  offset + DYNAMIC[code] * largest     offset: the mean of all scales; a largest for each 256 of them

Codes, scales and order are those of bitsandbytes (`quantize_4bit`, blocks of 64, nf4, compress_statistics): 0.516
bytes a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headway.nn.linear import Linear

BLOCK, SCALES = 64, 256
VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
"""Quantiles of the normal distribution, 0 among them (Dettmers et al. 2023, appendix E)."""
TINY = 1e-38  # a block of zeros has no scale to divide by


@lru_cache
def dynamic_map() -> Tensor:
    """The 256 values of an 8-bit number whose exponent takes as many bits as it needs (Dettmers et al. 2022, "8-bit
    Optimizers via Block-wise Quantization", section 1.3), in rising order."""
    found = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        means = 10.0 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)
        found += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(found))


@dataclass(frozen=True)
class Nf4:
    """A matrix [O, I].

    codes   uint8 [ceil(O I / 2)], two numbers each, the first in the high bits
    scales  uint8, one for each block of 64, in `dynamic_map`; largest: float32, one for each 256 of them
    offset  float32 scalar
    first   of a part of a matrix: the number of its first block in the whole
    row     blocks of a row of the whole matrix, where there is a part of it
    """

    codes: Tensor
    scales: Tensor
    largest: Tensor
    offset: Tensor
    shape: tuple[int, int]
    first: int = 0
    row: int | None = None

    @staticmethod
    def of(w: Tensor) -> Nf4:
        """The nearest codes of a matrix."""
        ratios, scale = _blocks(w.detach().reshape(-1).float(), BLOCK)
        nibbles = _nearest(ratios.flatten()[: w.numel()], torch.tensor(VALUES, device=w.device))
        nibbles = F.pad(nibbles, (0, w.numel() % 2), value=VALUES.index(0.0))
        offset = scale.mean()
        ratios, largest = _blocks(scale - offset, SCALES)
        scales = _nearest(ratios.flatten()[: scale.numel()], dynamic_map().to(w.device))
        return Nf4((nibbles[::2] << 4) | nibbles[1::2], scales, largest, offset, (w.shape[0], w.shape[1]))

    def scale(self) -> Tensor:
        """One for each block, float32."""
        values = dynamic_map().to(self.scales.device)[self.scales.flatten().int()]
        if self.row is None:
            largest = self.largest.repeat_interleave(SCALES)[: len(values)]
        else:
            rows, columns = self.shape[0], self.shape[1] // BLOCK
            at = self.first + torch.arange(rows)[:, None] * self.row + torch.arange(columns)
            largest = self.largest[at.flatten().to(values.device) // SCALES]
        return values * largest + self.offset

    def part(self, axis: int, own: range) -> Nf4:
        """Some rows (axis 0) or columns (axis 1) of a whole matrix, to the bit. Rows and columns are whole blocks."""
        rows, blocks = self.shape[0], self.shape[1] // BLOCK
        assert self.row is None
        assert self.shape[1] % BLOCK == 0
        assert axis == 0 or own.start % BLOCK == len(own) % BLOCK == 0

        def cut(flat: Tensor) -> Tensor:
            by_row = flat.view(rows, -1)
            each = 1 if axis == 0 else self.shape[1] // by_row.shape[1]
            return by_row.narrow(axis, own.start // each, len(own) // each).clone(
                memory_format=torch.contiguous_format
            )

        first = own.start * blocks if axis == 0 else own.start // BLOCK
        shape = (len(own), self.shape[1]) if axis == 0 else (rows, len(own))
        return Nf4(cut(self.codes), cut(self.scales), self.largest, self.offset, shape, first, blocks)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[O, I]: the product in float32, rounded to `dtype`."""
        count = self.shape[0] * self.shape[1]
        # a byte is looked up as the pair of numbers that it holds
        values = torch.tensor(VALUES, device=self.codes.device)
        pairs = torch.stack((values.repeat_interleave(16), values.repeat(16)), 1)
        flat = F.embedding(self.codes.int(), pairs).flatten()[:count]
        whole = count - count % BLOCK
        scale = self.scale()
        flat[:whole].view(-1, BLOCK).mul_(scale[: whole // BLOCK, None])
        flat[whole:].mul_(scale[whole // BLOCK :])
        return flat.view(self.shape).to(dtype)


def nf4_bytes(numbers: int) -> int:
    """Bytes of a matrix of so many numbers: codes, a scale for each 64, a largest for each 256 of them, an offset."""
    scales = -(-numbers // BLOCK)
    return -(-numbers // 2) + scales + 4 * -(-scales // SCALES) + 4


def _blocks(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(x / the largest |x| of its block [blocks, size], those largest): the last block is filled up with zeros."""
    blocks = F.pad(x, (0, -len(x) % size)).view(-1, size)
    largest = blocks.abs().amax(1)
    return (blocks * (1 / largest.clamp_min(TINY))[:, None]).clamp(-1, 1), largest


def _nearest(x: Tensor, values: Tensor) -> Tensor:
    """Index of the nearest of the rising `values`, uint8."""
    return torch.bucketize(x, (values[:-1] + values[1:]) / 2, out_int32=True).to(torch.uint8)


class Nf4Linear(Linear):
    """A `Linear` with its weight in NF4, frozen: dequantized in the forward pass and once more in the backward pass,
    and kept in neither. The product is in the dtype of x."""

    codes: Tensor
    scales: Tensor
    sizes: Tensor

    def __init__(self, layer: Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_parameter("weight", None)
        self.bias = layer.bias
        self._keep(Nf4.of(layer.matrix))

    def _keep(self, weight: Nf4) -> None:
        rows = (
            (weight.shape[0], -1) if weight.shape[1] % BLOCK == 0 else (-1,)
        )  # of whole blocks, which are cut
        self.register_buffer("codes", weight.codes.view(rows))
        self.register_buffer("scales", weight.scales.view(rows))
        # float32 under the name of int32, which a cast of the model leaves as it is
        self.register_buffer("sizes", torch.cat((weight.largest, weight.offset[None])).view(torch.int32))
        self._first, self._row = weight.first, weight.row

    def take(self, layer: Linear, axis: int, own: range) -> None:
        """See `Linear`."""
        assert isinstance(layer, Nf4Linear)
        self.register_parameter("weight", None)
        self._keep(layer.quantized.part(axis, own))

    @property
    def quantized(self) -> Nf4:
        """The weight as it is kept."""
        sizes, shape = self.sizes.view(torch.float32), (self.out_features, self.in_features)
        return Nf4(self.codes, self.scales, sizes[:-1], sizes[-1], shape, self._first, self._row)

    @property
    def matrix(self) -> Tensor:
        """W, dequantized, float32."""
        return self.quantized.dequantize()

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        y = self.product(x)
        return y if self.bias is None else y + self.bias

    def product(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        y: Tensor = _Product.apply(x, self.quantized)  # type: ignore[no-untyped-call]
        return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Nf4) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dequantize(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.weight.dequantize(grad.dtype), None
