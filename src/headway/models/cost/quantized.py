"""What weights of 8 or 4 bits take, counted from the spec."""

from __future__ import annotations

import torch

from headway.models.cost.adapters import linear_sizes
from headway.models.spec import ModelSpec
from headway.native.linear import panel_bytes


def quantized_saving(spec: ModelSpec, dtype: torch.dtype, bits: int, group: int | None) -> int:
    """Bytes that a model takes less than in `dtype` when the linear layers of its blocks are quantized
    (`headway.models.quantize.quantize_model`); in memory, where scales lie with each 32 inputs."""
    return sum(
        o * i * dtype.itemsize - panel_bytes(o, i, bits, group is not None and group < i)
        for o, i in linear_sizes(spec)
    )
