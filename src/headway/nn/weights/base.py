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
    """A matrix W [O, I] as a `Linear` keeps it: a value, whose tensors the layer registers.

    A form is a subclass and a row of `WEIGHTS`. It defines how it is packed, the tensors it is kept as, and the numbers
    these stand for; products, gradients of inputs, and the state dict follow. Override `fast_product` where there is a
    faster one, `part` where ranks may share it, and `native` where the kernels of decoding steps read it.

    Attributes:
        name: the row of `WEIGHTS`.
        exact: whether plain weights were packed to the bit: a state dict then holds these, under the name `weight`.
        unpacks: whether a product of many rows unpacks the matrix, so that all rows are best taken at once.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = False
    unpacks: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def pack(cls, w: Tensor) -> Self:
        """The form of plain weights [O, I]."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(O, I)."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors it is kept as, by name. A `Linear` registers them as buffers that no cast changes."""

    @abstractmethod
    def with_tensors(self, tensors: dict[str, Tensor]) -> Self:
        """The same form with other tensors, of the names of `tensors`."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """W [O, I], rounded once to `dtype`; in the dtype of its numbers unless given."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `dequantize`: float32 for numbers that are kept in fewer bits."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return next(iter(self.tensors().values())).device

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(t.nbytes for t in self.tensors().values())

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T (+ b): [..., I] -> [..., O]. Gradients reach x and b, and no frozen W."""
        if needs_gradient(x, bias):
            y: Tensor = _FrozenProduct.apply(x, self)  # type: ignore[no-untyped-call]
            return y if bias is None else y + bias
        return self.fast_product(x, bias)

    def fast_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`product` where neither x nor the bias needs a gradient."""
        return F.linear(x, self.dequantize(x.dtype), bias)

    def side_by_side(
        self, x: Tensor, weights: "Sequence[Weight]", biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """The products of one x with several weights, of which this is the first."""
        return [w.product(x, bias) for w, bias in zip(weights, biases, strict=True)]

    def rows(self, at: Tensor) -> Tensor:
        """Rows [..., I] of these numbers, as an embedding looks them up, in the dtype of `dequantize`."""
        return F.embedding(at, self.dequantize())

    def part_reason(self, axis: int, rows: range) -> str | None:
        """Why it cannot be cut to these rows (axis 0) or columns (axis 1); None if it can."""
        return f"has weights in {self.name}, of which there are no parts; use plain weights"

    def part(self, axis: int, rows: range) -> Self:
        """Some rows (axis 0) or columns (axis 1), the same numbers, where there is no `part_reason`."""
        raise AssertionError(self.part_reason(axis, rows))

    def native(self) -> Matrix | str:
        """The matrix that the kernels of a decoding step read, or the reason why they cannot."""
        return f"the kernels read no weights in {self.name}"

    def merge_reason(self) -> str | None:
        """Why an adapter cannot be merged into it; None if it can."""
        return f"has weights in {self.name}, which would be rounded again"

    def extra_repr(self) -> str:
        """Its part of a layer's repr."""
        return f"{self.name}, {8 * self.nbytes / (self.shape[0] * self.shape[1]):.2f} bits a weight"


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether a gradient is to reach one of these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class _FrozenProduct(torch.autograd.Function):
    """x W^T, with W dequantized in the forward pass and once more in the backward pass, and kept in neither."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dequantize(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.weight.dequantize(grad.dtype), None
