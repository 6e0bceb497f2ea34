"""bf16 weights compressed losslessly, to 70 % of their bytes."""

import threading
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.native.compressed import Compressed
from headway.native.linear import MOST_ROWS, Matrix, linear, unsupported_reason
from headway.nn.weights.base import Weight

AT_ONCE = 1 << 25
"""Number of weights that are unpacked at a time."""

_kept = threading.local()


def _scratch(size: int) -> Tensor:
    """Returns memory for at least `size` bf16 numbers, reused by all calls of a thread, since new pages cost more
    than unpacking."""
    scratch: Tensor | None = getattr(_kept, "scratch", None)
    if scratch is None or len(scratch) < size:
        scratch = _kept.scratch = torch.empty(size, dtype=torch.bfloat16)
    return scratch


@dataclass(frozen=True, eq=False)
class CompressedWeight(Weight):
    """`headway.native.compressed.Compressed`: the same numbers as plain bf16 weights.

    up to 64 rows, float32 or bf16 on a CPU   by the kernels, with the results of plain weights, bit for bit
    otherwise                                 by torch, with W unpacked block by block
    """

    name: ClassVar[str] = "compressed"
    exact: ClassVar[bool] = True
    unpacks: ClassVar[bool] = True
    packed: Compressed

    @classmethod
    def pack(cls, w: Tensor) -> Self:
        """See `Weight`. Raises BackendError for weights that are not bf16 on the CPU, and without the kernels."""
        return cls(Compressed.pack(w))

    @property
    def shape(self) -> tuple[int, int]:
        """See `Weight`."""
        return self.packed.outputs, self.packed.inputs

    @property
    def dtype(self) -> torch.dtype:
        """See `Weight`."""
        return torch.bfloat16

    def tensors(self) -> dict[str, Tensor]:
        """See `Weight`."""
        return {"data": self.packed.data, "starts": self.packed.starts}

    def with_tensors(self, tensors: dict[str, Tensor]) -> Self:
        """See `Weight`."""
        return type(self)(self.packed._replace(data=tensors["data"], starts=tensors["starts"]))

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """See `Weight`."""
        w = self.packed.unpack()
        return w if dtype is None else w.to(dtype)

    def fast_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Weight`."""
        packed = self.packed
        if 0 < x.numel() <= MOST_ROWS * packed.inputs and unsupported_reason(x, [packed]) is None:
            return linear(x, [packed], [None if bias is None else bias.detach().float()])[0]
        step = max(1, min(packed.outputs, AT_ONCE // packed.inputs))
        parts = []
        for first in range(0, packed.outputs, step):
            part = packed.unpack(first, step, into=_scratch(step * packed.inputs)).to(x.dtype)
            parts.append(F.linear(x, part, None if bias is None else bias[first : first + step]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def part_reason(self, axis: int, rows: range) -> None:
        """See `Weight`."""

    def part(self, axis: int, rows: range) -> Self:
        """See `Weight`."""
        return self.pack(self.packed.unpack().narrow(axis, rows.start, len(rows)).contiguous())

    def native(self) -> Matrix | str:
        """See `Weight`."""
        return self.packed
