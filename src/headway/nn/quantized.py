"""A `Linear` with weights of 8 or 4 bits.

Legend: I numbers in, O numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.native.linear import PANEL, Panels, linear, unsupported_reason
from headway.nn.linear import Linear
from headway.nn.lora import LoraLinear
from headway.nn.parallel import ColumnParallelLinear
from headway.quantization import QuantizedMatrix

BLOCK = 1 << 22
"""Weights that are dequantized at a time."""


class QuantizedLinear(Linear):
    """x W'^T (+ b), with W' [O, I] = scale (code - zero) kept as the kernels read it (`headway.native.linear.Panels`).

        float32, bf16 on a CPU   x' W'^T by the kernels: x' is x in 8 bits, in groups of 32 inputs; sums of a group are
                                 integers, and exact
        else, or no kernels      x W'^T in the dtype of x, W' dequantized block by block and rounded to that dtype

    With m the largest |x| of a group, |x - x'| <= m / 254, and y is off by the sum over groups of m / 254 sum |w'| at
    most; independent roundings make a variance of the sum over groups of (m / 440)^2 sum w'^2. A row's results do not
    depend on how many rows there are.

    The weights are not trained and no gradient goes through them: ConfigError for an input that needs one, and for
    training mode."""

    codes: Tensor
    factor: Tensor

    def __init__(self, layer: Linear, matrix: QuantizedMatrix) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_parameter("weight", None)
        self.bias = layer.bias
        panels = Panels.pack(matrix)
        self.register_buffer("codes", panels.data)
        # float32 under the name of int32, which a cast of the model leaves as it is
        self.register_buffer("factor", panels.factor.view(torch.int32))
        self._form = panels._replace(data=torch.empty(0), factor=torch.empty(0))
        self.training = False

    @property
    def panels(self) -> Panels:
        """The weights as they are kept."""
        return self._form._replace(data=self.codes, factor=self.factor.view(torch.float32))

    @property
    def matrix(self) -> Tensor:
        """W', float32."""
        return self.panels.unpack().dequantize()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.codes.nbytes + self.factor.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return quantized_products(x, [self])[0]

    def train(self, mode: bool = True) -> QuantizedLinear:
        """Raises ConfigError for training mode."""
        if mode:
            raise ConfigError(
                f"a model with weights of {self._form.bits} bits is not trained; train the model as it was before, and "
                "quantize it afterwards (headway quantize)"
            )
        return self

    def extra_repr(self) -> str:
        form = self._form
        each = f"groups of {form.group}" if form.group < form.inputs else "rows"
        return f"{super().extra_repr()}, bits={form.bits}, scales of {each}"


def products(x: Tensor, layers: Sequence[Linear]) -> list[Tensor]:
    """layer(x) of each. Quantized ones are one call of the kernels, which rounds x once; those that ranks share sum its
    gradient once."""
    if all(type(layer) is QuantizedLinear and not _has_hooks(layer) for layer in layers):
        return quantized_products(x, cast(Sequence[QuantizedLinear], layers))
    base = layers[0].base if isinstance(layers[0], LoraLinear) else layers[0]
    if isinstance(base, ColumnParallelLinear):
        x = base.enter(x)
        return [layer.local(x) for layer in layers]
    return [layer(x) for layer in layers]


def _has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def quantized_products(x: Tensor, layers: Sequence[QuantizedLinear]) -> list[Tensor]:
    """[..., I] -> [..., O] of each layer. Raises ConfigError for an x that needs a gradient."""
    if torch.is_grad_enabled() and x.requires_grad:
        raise ConfigError(
            f"weights of {layers[0].panels.bits} bits give no gradient: run them under torch.no_grad(), or train "
            "beside the model as it was before (headway train --base nf4 keeps that in 4 bits)"
        )
    panels = [layer.panels for layer in layers]
    if x.numel() and unsupported_reason(x, panels) is None:
        return linear(
            x, panels, [None if layer.bias is None else layer.bias.detach().float() for layer in layers]
        )
    return [dequantized_linear(x, own, layer.bias) for own, layer in zip(panels, layers, strict=True)]


def dequantized_linear(x: Tensor, panels: Panels, bias: Tensor | None) -> Tensor:
    """x W'^T (+ b) in the dtype of x, whose numbers are not rounded; W' is made block by block."""
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty(len(rows), panels.outputs)
    step = max(1, BLOCK // (PANEL * panels.inputs))
    for first in range(0, len(panels.data), step):
        part = panels.unpack(first, step).dequantize(x.dtype)
        at = slice(first * PANEL, first * PANEL + len(part))
        out[:, at] = F.linear(rows, part, None if bias is None else bias[at])
    return out.view(*x.shape[:-1], panels.outputs)
