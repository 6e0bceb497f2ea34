"""`nn.Linear` in an accelerated model.

    up to 64 rows on a CPU, no gradient   by the kernels, which read each weight once (`headway.native.linear`)
    more rows, or a gradient              by torch
    quantized                             any number of rows by `headway.nn.Rounded`, kept beside the layer's weight
    compressed                            up to 64 rows by `headway.nn.CompressedWeight`, kept beside it as well

Legend: I numbers in, O numbers out.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.models.quantize import weight_kind
from headway.native.linear import MOST_ROWS, Matrix, linear, unsupported_reason
from headway.nn.weights import CompressedWeight, Weight, from_codes
from headway.quantization import quantize_clipped

KEPT, PUT = "_headway_weights", "_headway_put"
COMPRESSED = "compressed"


@dataclass(frozen=True)
class Beside:
    """Weights that replace a layer's weight in products, with the parameter that they were made from and its
    version."""

    kept: Weight
    weight: Tensor
    version: int

    def is_of(self, weight: Tensor) -> bool:
        """Returns whether they were made from this parameter in its current version."""
        return weight is self.weight and weight._version == self.version

    def __deepcopy__(self, memo: dict[int, Any]) -> "Beside":
        weight = copy.deepcopy(self.weight, memo)  # the copy's version counter starts again
        changes = self.weight._version - self.version
        return Beside(copy.deepcopy(self.kept, memo), weight, weight._version - changes)


def put(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replaces the forward of `module`, until `take_back`."""
    module.__dict__["forward"] = module.__dict__[PUT] = MethodType(forward, module)


def take_back(module: nn.Module) -> None:
    """Undoes `put` and `put_beside`. Raises ConfigError if something else has replaced the forward since."""
    module.__dict__.pop(KEPT, None)
    ours = module.__dict__.get(PUT)
    if ours is None:
        return
    if put_in(module) is not ours.__func__:
        raise ConfigError(
            f"the forward of a {type(module).__name__} was replaced after the model was accelerated; undo that first "
            "(of accelerate: unwrap_model(model, keep_fp32_wrapper=False))"
        )
    del module.__dict__["forward"], module.__dict__[PUT]


def put_in(module: nn.Module) -> Callable[..., Any] | None:
    """Returns the function that overrides the class's forward, or None."""
    forward = module.__dict__.get("forward")
    return getattr(forward, "__func__", forward)


def linear_forward(self: nn.Linear, input: Tensor) -> Tensor:
    """Returns x W^T (+ b): [..., I] -> [..., O]."""
    weights = beside(self)
    if weights is not None and not weights.exact:
        return weights.product(input, self.bias)
    outputs = by_kernels(input, (self,))
    return F.linear(input, self.weight, self.bias) if outputs is None else outputs[0]


def side_by_side(x: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    """Returns the output of each layer for x, in one call of the kernels if each layer would call them."""
    plain = all(
        put_in(layer) is linear_forward and not (layer._forward_hooks or layer._forward_pre_hooks)
        for layer in layers
    )
    outputs = by_kernels(x, layers) if plain else None
    return [layer(x) for layer in layers] if outputs is None else outputs


def by_kernels(x: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor] | None:
    """Returns x [..., I] times the weights of each layer, [..., O], by the kernels; None if torch must compute it."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return None
    if type(x) is not Tensor or not x.numel():
        return None
    matrices: list[Matrix] = []
    for layer in layers:
        weights = beside(layer)
        is_plain = weights is None or weights.exact
        if is_plain and (layer.weight.dtype != x.dtype or x.numel() > MOST_ROWS * x.shape[-1]):
            return None
        matrix = layer.weight.detach() if weights is None else weights.native()
        if isinstance(matrix, str):
            return None
        matrices.append(matrix)
    if unsupported_reason(x, matrices) is not None:
        return None
    return linear(
        x, matrices, [None if layer.bias is None else layer.bias.detach().float() for layer in layers]
    )


def put_beside(layer: nn.Linear, weights: str) -> None:
    """Adds weights of 8 or 4 bits, or compressed ones, that replace the layer's weight in products."""
    plain = layer.weight.detach()
    if weights == COMPRESSED:
        stored: Weight = CompressedWeight.pack(plain)
    else:
        stored = from_codes(quantize_clipped(plain, *weight_kind(weights)))
    layer.__dict__[KEPT] = Beside(stored, layer.weight, layer.weight._version)


def beside(layer: nn.Module) -> Weight | None:
    """Returns the weights that `put_beside` added to a layer, or None.

    Raises ConfigError in training mode, and if the layer's own weight has changed since."""
    stored: Beside | None = layer.__dict__.get(KEPT)
    if stored is None:
        return None
    if layer.training:
        raise ConfigError(
            "a model that was accelerated with weights=... cannot be trained; restore(model), train, and accelerate it "
            "again"
        )
    if not stored.is_of(cast(nn.Linear, layer).weight):
        raise ConfigError(
            "weights have changed after they were quantized or compressed; restore(model) and "
            "accelerate(model, weights=...) again"
        )
    return stored.kept
