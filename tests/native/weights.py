"""Weights in blocks of 256 with codes of every size, and rows in 8 bits as the kernels multiply them."""

import torch
from torch import Tensor

from headway.block_quantization import PARTS, BlockMatrix
from headway.native.panels import GROUP


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows in 8 bits as the kernels multiply them: (whole numbers [R, G, 32], scales [R, G])."""
    rows, inputs = x.shape
    groups = torch.zeros(rows, -(-inputs // GROUP) * GROUP)
    groups[:, :inputs] = x.float()
    groups = groups.view(rows, -1, GROUP)
    largest = groups.abs().amax(2)
    factor = torch.full_like(largest, 127) / largest  # 127 / tensor is rounded twice
    q = (groups * factor.unsqueeze(2)).nan_to_num(0.0).round()
    return q, largest / 127


def drawn(outputs: int, inputs: int, bits: int, seed: int = 0) -> BlockMatrix:
    """Returns a matrix with codes and scales of every size."""
    generator = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.randint(low, high, (outputs, count), generator=generator).to(dtype)

    parts, blocks = inputs // PARTS[bits], inputs // 256
    d = (torch.rand(outputs, blocks, generator=generator) * 0.01).half()
    codes = whole(0, 1 << bits, inputs)
    if bits == 6:
        return BlockMatrix(codes, whole(-128, 128, parts, torch.int8), None, d, None, bits)
    dmin = (torch.rand(outputs, blocks, generator=generator) * 0.1).half()
    return BlockMatrix(codes, whole(0, 64, parts), whole(0, 64, parts), d, dmin, bits)
