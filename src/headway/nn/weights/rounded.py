"""Weights of 8 or 4 bits, in the layout that the kernels read.

Legend: O outputs, I inputs.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.native.block_panels import BlockPanels
from headway.native.linear import Matrix, linear, unsupported_reason
from headway.native.panels import GROUP, PANEL, Panels
from headway.nn.weights.base import Weight, needs_gradient
from headway.quantization import quantize_clipped

AT_ONCE = 1 << 22
"""Number of weights that are dequantized at a time."""


@dataclass(frozen=True, eq=False)
class Packed(Weight):
    """Quantized weights W' [O, I] in panels of the kernels.

        float32, bf16 on a CPU   x' W'^T by the kernels: x' is x in 8 bits, in groups of 32 inputs; the sum of a group
                                 is an exact integer
        otherwise                x W'^T in the dtype of x, with W' dequantized block by block and rounded to that dtype
        gradients of x           x W'^T likewise, with W' dequantized again in the backward pass

    With m the largest |x| of a group, |x - x'| <= m / 254, so the error of y is at most the sum over groups of m /
    254 sum |w'|; if roundings are independent, its variance is the sum over groups of (m / 440)^2 sum w'^2. The
    result of a row does not depend on how many rows there are."""

    panels: Panels | BlockPanels

    @property
    def shape(self) -> tuple[int, int]:
        """See `Weight`."""
        return self.panels.outputs, self.panels.inputs

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """See `Weight`."""
        return self.panels.unpack().dequantize(dtype or torch.float32)

    def rows(self, at: Tensor) -> Tensor:
        """See `Weight`."""
        return self.panels.rows(at.flatten()).view(*at.shape, self.panels.inputs)

    def fast_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Weight`."""
        return self.side_by_side(x, [self], [bias])[0]

    def side_by_side(
        self, x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """See `Weight`: one call of the kernels, which rounds x once."""
        panels = [w.panels for w in weights if isinstance(w, Packed)]
        if needs_gradient(x, *biases) or len(panels) < len(weights):
            return super().side_by_side(x, weights, biases)
        if x.numel() and unsupported_reason(x, panels) is None:
            return linear(x, panels, [None if bias is None else bias.detach().float() for bias in biases])
        return [dequantized_linear(x, p, bias) for p, bias in zip(panels, biases, strict=True)]

    @property
    @abstractmethod
    def group(self) -> int:
        """Number of inputs that must stay together when columns are divided: those that share a scale, or that the
        kernels round together."""

    def part_reason(self, axis: int, rows: range) -> str | None:
        """See `Weight`. Columns must be whole groups."""
        group = self.group
        if axis == 0 or (rows.start % group == 0 and len(rows) % group == 0):
            return None
        return (
            f"has weights in {self.name} in groups of {group} inputs, which {len(rows)} inputs per process split; "
            f"use a number of processes that leaves a multiple of {group}, or plain weights (dequantize=True)"
        )

    def part(self, axis: int, rows: range) -> Self:
        """See `Weight`."""
        panels: Any = self.panels
        return replace(self, panels=panels.pack(panels.unpack().part(axis, rows)))

    def native(self) -> Matrix | str:
        """See `Weight`."""
        return self.panels


@dataclass(frozen=True, eq=False)
class Rounded(Packed):
    """W' = scale (code - zero), in `headway.native.panels.Panels`, with the products of `Packed`."""

    bits: ClassVar[int]
    panels: Panels

    @classmethod
    def pack(cls, w: Tensor) -> Self:
        """See `Weight`: takes the nearest codes, with a scale for each 32 inputs of an output (`quantize_clipped`)."""
        return cls(Panels.pack(quantize_clipped(w, cls.bits, GROUP)))

    def tensors(self) -> dict[str, Tensor]:
        """See `Weight`."""
        return {"codes": self.panels.data, "factor": self.panels.factor}

    def with_tensors(self, tensors: dict[str, Tensor]) -> Self:
        """See `Weight`."""
        return type(self)(self.panels._replace(data=tensors["codes"], factor=tensors["factor"]))

    @property
    def group(self) -> int:
        """See `Packed`."""
        return self.panels.group if self.panels.has_scales else GROUP

    def extra_repr(self) -> str:
        """See `Weight`."""
        panels = self.panels
        return f"{self.name}, scales of {f'groups of {panels.group}' if panels.has_scales else 'rows'}"


class Int8(Rounded):
    """Weights of 8 bits."""

    name, bits = "int8", 8


class Int4(Rounded):
    """Weights of 4 bits."""

    name, bits = "int4", 4


def dequantized_linear(x: Tensor, panels: Panels | BlockPanels, bias: Tensor | None) -> Tensor:
    """Returns x W'^T (+ b) in the dtype of x, without rounding x; W' is dequantized block by block."""
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty(len(rows), panels.outputs)
    step = max(1, AT_ONCE // (PANEL * panels.inputs))
    for first in range(0, len(panels.data), step):
        part = panels.unpack(first, step).dequantize(x.dtype)
        at = slice(first * PANEL, first * PANEL + len(part))
        out[:, at] = F.linear(rows, part, None if bias is None else bias[at])
    return out.view(*x.shape[:-1], panels.outputs)
