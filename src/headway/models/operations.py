"""Operations of the native kernels on a few rows, and the buffers ("rooms") through which they pass results.

Legend: R rows, I inputs, O outputs.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import BackendError
from headway.native import interface as c
from headway.native.linear import MOST_ROWS, Matrix, matrix_struct
from headway.native.panels import Panels
from headway.nn.norms import KINDS, LayerNorm, RMSNorm


class NotLowered(BackendError):
    """Raised with the reason why something cannot be lowered to operations of the kernels."""


class Operations:
    """Creates operations on up to 64 rows of one dtype, and keeps alive the memory that they point to."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.kept: list[object] = []  # memory that the structures point to
        self._structs: list[Any] = []  # structures of the operations; `resize` sets their `rows`
        self._rooms: dict[tuple[str, int], Tensor] = {}
        self._rows = 0

    def resize(self, rows: int) -> None:
        """Makes the operations compute this number of rows, up to 64."""
        if self._rows == rows:
            return
        self._rows = rows
        for struct in self._structs:
            struct.rows = rows
            if isinstance(struct, c.HeadsStruct):
                struct.tokens = rows

    def room(self, name: str, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a buffer of rows through which operations pass results; equal name and width give the same memory."""
        if (name, columns) not in self._rooms:
            self._rooms[name, columns] = torch.zeros(MOST_ROWS, columns, dtype=dtype or self.dtype)
        return self._rooms[name, columns]

    def matrix(
        self,
        matrix: Matrix,
        out: Tensor,
        bias: Tensor | None = None,
        factor: Tensor | None = None,
        add: bool = False,
    ) -> c.MatrixStruct:
        """Returns one matrix of a product: out (+)= factor * (x W^T) + bias; `factor` and bias are [O]."""
        self.kept.append(matrix)
        if factor is not None:
            factor = self.floats(factor * matrix.factor if isinstance(matrix, Panels) else factor)
        return matrix_struct(matrix, out, self.floats(bias), factor, add=add)

    def product(
        self,
        x: Tensor,
        structs: Sequence[c.MatrixStruct],
        *,
        norm: nn.Module | None = None,
        act: int = 0,
        gate: Tensor | None = None,
    ) -> c.OpStruct:
        """Returns the operation that multiplies rows x [R, I], or act(norm(x)) * gate, with matrices.

        Raises NotLowered for a norm that the kernels do not support.
        """
        matrices = (c.MatrixStruct * len(structs))(*structs)
        self.kept.append(matrices)
        struct = self.reads(x, norm)
        struct.matrices, struct.count = matrices, len(structs)
        struct.act, struct.gate = act, address(gate)
        return self.op(c.PRODUCTS, struct)

    def added(self, x: Tensor, y: Tensor, norm: nn.Module | None, scale: float) -> c.OpStruct:
        """Returns the operation x += scale * norm(y), in place on rows x. Raises NotLowered for a norm that the
        kernels do not support."""
        return self.op(c.ADDED, c.AddedStruct(0, scale, x.data_ptr(), self.reads(y, norm)))

    def reads(self, x: Tensor, norm: nn.Module | None) -> c.ProductsStruct:
        """Returns the input part of a product: rows x, or norm(x)."""
        struct = c.ProductsStruct(0, 0, x.shape[1], c.TYPES[x.dtype], x.data_ptr(), x.stride(0))
        if norm is not None:
            known = self.known(norm)
            struct.norm, struct.eps = kind_of(known), known.eps
            struct.gain, struct.shift = (address(self.floats(t)) for t in (known.gain, known.bias))
        return struct

    def norm(self, norm: nn.Module, x: Tensor) -> c.OpStruct:
        """Returns the operation x = norm(x), in place on rows x. Raises NotLowered for a norm that the kernels do
        not support."""
        known = self.known(norm)
        if kind_of(known) == c.NORMS["wide rms"] and self.dtype != torch.float32:
            raise NotLowered(
                "the kernels round an RMSNorm before its gain, but this model rounds it after the gain"
            )
        weights = [None if t is None else t.detach().contiguous() for t in (known.gain, known.bias)]
        self.kept += weights
        struct = c.NormStruct(
            0, 0, x.shape[1], c.TYPES[x.dtype], c.NORMS[KINDS[type(norm)]], known.eps, x.data_ptr(), None,
            *map(address, weights), None, x.data_ptr(),
        )  # fmt: skip
        return self.op(c.NORM, struct)

    def factors(
        self, out: Tensor, heads: int, *, lse: Tensor | None = None, sink: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> c.OpStruct:  # fmt: skip
        """Returns the operation that multiplies the heads in rows `out`, in place, by sigmoid(lse - sink) and by
        sigmoid(gate), if given."""
        struct = c.FactorsStruct(
            0, heads, out.shape[1] // heads, c.TYPES[out.dtype], out.data_ptr(), out.stride(0),
            address(lse), address(self.floats(sink)), 0 if lse is None else lse.stride(0),
            address(gate), 0 if gate is None else gate.stride(0),
        )  # fmt: skip
        return self.op(c.FACTORS, struct)

    def known(self, norm: nn.Module) -> RMSNorm | LayerNorm:
        """Returns the norm if the kernels support its type. Raises NotLowered otherwise."""
        if not isinstance(norm, RMSNorm | LayerNorm) or type(norm) not in KINDS:
            raise NotLowered(f"the kernels do not support the norm {type(norm).__name__}")
        return norm

    def op(self, kind: int, struct: ctypes.Structure) -> c.OpStruct:
        """Returns an operation of the kernels, on as many rows as `resize` sets."""
        self._structs.append(struct)
        return c.OpStruct(kind, ctypes.addressof(struct))

    def floats(self, t: Tensor | None) -> Tensor | None:
        """Returns the tensor in float32, and keeps it alive for the kernels; None for None."""
        if t is None:
            return None
        wide = t.detach().float().contiguous()
        self.kept.append(wide)
        return wide


def kind_of(norm: RMSNorm | LayerNorm) -> int:
    """Returns the number of a norm in `interface.NORMS`; "wide rms", an RMSNorm with an offset, rounds only after
    its gain."""
    return c.NORMS["wide rms" if isinstance(norm, RMSNorm) and norm.offset else KINDS[type(norm)]]


def address(t: Tensor | None) -> int | None:
    """Returns the address of a tensor's data; None for None."""
    return None if t is None else t.data_ptr()
