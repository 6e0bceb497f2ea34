"""The interface of all forms of a linear layer's weights.

Legend: O outputs, I inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from headway.native.linear import Matrix


class Weight(ABC):
    """A matrix W [O, I] in the form in which a `Linear` stores it: a value, whose tensors the layer registers.

    A form is a subclass and a row of `WEIGHTS`. It defines how plain weights are packed, which tensors are stored, and
    which numbers these represent; products, gradients of inputs, and the state dict follow from that. Override
    `fast_product` if there is a faster one, `part` if ranks may share the matrix, and `native` if the kernels of
    decoding steps read it.

    Attributes:
        name: the key in `WEIGHTS`.
        exact: whether packing plain weights is lossless: a state dict then holds the plain weights, under the name
            `weight`.
        unpacks: whether a product of many rows unpacks the matrix, so that all rows are best multiplied at once.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = False
    unpacks: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def pack(cls, w: Tensor) -> Self:
        """Returns plain weights [O, I] in this form."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(O, I)."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Returns the stored tensors, by name. A `Linear` registers them as buffers that no cast changes."""

    @abstractmethod
    def with_tensors(self, tensors: dict[str, Tensor]) -> Self:
        """Returns the same form with other tensors, under the names of `tensors`."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns W [O, I], rounded once to `dtype`, by default the dtype of its numbers."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `dequantize`: float32 for quantized weights."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return next(iter(self.tensors().values())).device

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(t.nbytes for t in self.tensors().values())

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x W^T (+ b): [..., I] -> [..., O]. Gradients reach x and b, but not a frozen W."""
        if needs_gradient(x, bias):
            y: Tensor = _FrozenProduct.apply(x, self)  # type: ignore[no-untyped-call]
            return y if bias is None else y + bias
        return self.fast_product(x, bias)

    def fast_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Computes `product` if neither x nor the bias needs a gradient."""
        return F.linear(x, self.dequantize(x.dtype), bias)

    def side_by_side(
        self, x: Tensor, weights: "Sequence[Weight]", biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Returns the products of one x with several weights, of which this is the first."""
        return [w.product(x, bias) for w, bias in zip(weights, biases, strict=True)]

    def rows(self, at: Tensor) -> Tensor:
        """Looks up rows [..., I], as an embedding does, in the dtype of `dequantize`."""
        return F.embedding(at, self.dequantize())

    def part_reason(self, axis: int, rows: range) -> str | None:
        """Returns why the matrix cannot be reduced to these rows (axis 0) or columns (axis 1), or None if it can."""
        return f"has weights in {self.name}, which cannot be sharded; use plain weights"

    def part(self, axis: int, rows: range) -> Self:
        """Returns some rows (axis 0) or columns (axis 1), with the same numbers, provided that there is no
        `part_reason`."""
        raise AssertionError(self.part_reason(axis, rows))

    def native(self) -> Matrix | str:
        """Returns the matrix that the kernels of a decoding step read, or the reason why they cannot."""
        return f"the kernels do not support weights in {self.name}"

    def merge_reason(self) -> str | None:
        """Returns why an adapter cannot be merged into it, or None if it can."""
        return f"has weights in {self.name}, which would be rounded again"

    def extra_repr(self) -> str:
        """Returns its part of a layer's repr."""
        return f"{self.name}, {8 * self.nbytes / (self.shape[0] * self.shape[1]):.2f} bits a weight"


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Returns whether any of these tensors needs a gradient."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class _FrozenProduct(torch.autograd.Function):
    """x W^T, with W dequantized in the forward pass and again in the backward pass, and kept in neither."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dequantize(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.weight.dequantize(grad.dtype), None
