"""A `Linear` with its bf16 weights compressed, to the bit.

Legend: I numbers in, O numbers out.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.native.compressed import Compressed
from headway.native.linear import MOST_ROWS, linear, unsupported_reason
from headway.nn.linear import Linear

BLOCK = 1 << 25
"""Weights that are unpacked at a time."""

_kept = threading.local()


def _scratch(size: int) -> Tensor:
    """Memory for so many bf16 numbers or more, a thread's for all its calls: new pages cost more than unpacking."""
    found: Tensor | None = getattr(_kept, "scratch", None)
    if found is None or len(found) < size:
        found = _kept.scratch = torch.empty(size, dtype=torch.bfloat16)
    return found


class CompressedLinear(Linear):
    """x W^T (+ b), with W [O, I] kept as `headway.native.compressed.Compressed`: 70 % of its bytes, the same numbers.

        up to 64 rows, float32 or bf16 on a CPU   by the kernels: the results of plain weights, to the bit
        else                                      by torch, W unpacked block by block

    The weights are not trained: ConfigError for training mode. Gradients reach x. A state dict has plain weights."""

    data: Tensor
    starts: Tensor

    def __init__(self, layer: Linear, packed: Compressed) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_parameter("weight", None)
        self.bias = layer.bias
        self.register_buffer("data", packed.data, persistent=False)
        self.register_buffer("starts", packed.starts, persistent=False)
        self._table = packed.table
        self.training = False

    @property
    def packed(self) -> Compressed:
        """The weights as they are kept."""
        return Compressed(self.data, self.starts, self._table, self.out_features, self.in_features)

    @property
    def matrix(self) -> Tensor:
        """W, bf16."""
        return self.packed.unpack()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.packed.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        packed = self.packed
        few = 0 < x.numel() <= MOST_ROWS * self.in_features and not (
            torch.is_grad_enabled() and x.requires_grad
        )
        if few and unsupported_reason(x, [packed]) is None:
            return linear(x, [packed], [None if self.bias is None else self.bias.detach().float()])[0]
        if torch.is_grad_enabled() and x.requires_grad:  # which keeps the weights until the backward
            return F.linear(x, packed.unpack().to(x.dtype), self.bias)
        step = max(1, min(self.out_features, BLOCK // self.in_features))
        parts = []
        for first in range(0, self.out_features, step):
            part = packed.unpack(first, step, into=_scratch(step * self.in_features)).to(x.dtype)
            parts.append(F.linear(x, part, None if self.bias is None else self.bias[first : first + step]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.matrix

    def train(self, mode: bool = True) -> CompressedLinear:
        """Raises ConfigError for training mode."""
        if mode:
            raise ConfigError(
                "a model with compressed weights is not trained; train the model as it was before"
            )
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={8 * self.nbytes / (self.in_features * self.out_features):.1f}"
