"""Weights as they are trained: a floating-point tensor."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from headway.native.linear import Matrix
from headway.nn.products import linear
from headway.nn.weights.base import Weight


@dataclass(frozen=True, eq=False, slots=True)
class Plain(Weight):
    """W itself, the parameter `weight` of its layer, which gets gradients."""

    name: ClassVar[str] = "plain"
    exact: ClassVar[bool] = True
    w: Tensor

    @classmethod
    def pack(cls, w: Tensor) -> Self:
        """See `Weight`."""
        return cls(w)

    @property
    def shape(self) -> tuple[int, int]:
        """See `Weight`."""
        return self.w.shape[0], self.w.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """See `Weight`."""
        return self.w.dtype

    def tensors(self) -> dict[str, Tensor]:
        """See `Weight`."""
        return {"weight": self.w}

    def with_tensors(self, tensors: dict[str, Tensor]) -> Self:
        """See `Weight`."""
        return type(self)(tensors["weight"])

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """See `Weight`."""
        return self.w if dtype is None else self.w.to(dtype)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Weight`."""
        return linear(x, self.w, bias)

    def part_reason(self, axis: int, rows: range) -> None:
        """See `Weight`."""

    def part(self, axis: int, rows: range) -> Self:
        """See `Weight`."""
        cut = self.w.detach().narrow(axis, rows.start, len(rows))
        return type(self)(cut.clone(memory_format=torch.contiguous_format))

    def native(self) -> Matrix | str:
        """See `Weight`."""
        return self.w.detach() if self.w.stride(1) == 1 else "the kernels need weights with contiguous rows"

    def merge_reason(self) -> None:
        """See `Weight`."""

    def extra_repr(self) -> str:
        """See `Weight`."""
        return ""
