"""Products of rows with weight matrices: y = x W^T (+ b).

    W [O, I] float32 or bf16    without repacking; for few rows, as in decoding, where each weight is read once, at
                                memory bandwidth
    `Compressed`, 11 bits       for few rows; bit-identical to the results of the bf16 weights it was made of
    `Nf4Matrix`, 4 bits         for few rows; the dequantized weights are rounded to the dtype of x
    `Panels` of 8 or 4 bits     for any number of rows: up to four as above, more in tiles kept in registers
    `BlockPanels`, 4 to 6 bits  likewise

For panels x is rounded to 8 bits in groups of 32 inputs: |x - x'| <= max |x of the group| / 254. The sums within a
group are exact integers; the sums over groups are float32, in a fixed order. So the result of a row does not depend
on the other rows, to the bit.

Legend: R rows, I inputs, O outputs, P = ceil(O / 16) panels, G = ceil(I / 32) groups.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from headway.errors import BackendError
from headway.native import interface as c
from headway.native.block_panels import BlockPanels
from headway.native.compressed import Compressed
from headway.native.loader import library, threads
from headway.native.nf4 import Nf4Matrix
from headway.native.panels import Panels

MOST_ROWS = 64
"""Largest number of rows in a decoding step."""
FLOATS = torch.float32, torch.bfloat16
BLOCKS = {4: c.Q4_K, 5: c.Q5_K, 6: c.Q6_K}
Matrix = Tensor | Panels | BlockPanels | Compressed | Nf4Matrix


def unsupported_reason(x: Tensor, matrices: Sequence[Matrix]) -> str | None:
    """Returns why the kernels cannot take x and these matrices; None if they can."""
    if library() is None:
        return "the native kernels are not loaded"
    if x.device.type != "cpu" or x.dtype not in FLOATS:
        return f"the kernels take float32 and bf16 on the CPU, not {x.dtype} on {x.device}"
    for matrix in matrices:
        if isinstance(matrix, Tensor) and (matrix.dtype not in FLOATS or matrix.stride(1) != 1):
            return "the kernels take float32 or bf16 weights with contiguous rows"
    return None


def linear(
    x: Tensor, matrices: Sequence[Matrix], biases: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    """Returns the product of x [..., I] with each matrix, [..., O] in the dtype of x; biases are float32.

    Raises BackendError if the kernels cannot take the arguments (`unsupported_reason`)."""
    if reason := unsupported_reason(x, matrices):
        raise BackendError(reason)
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    outs = [x.new_empty(len(rows), _outputs(matrix)) for matrix in matrices]
    structs = (c.MatrixStruct * len(matrices))(
        *(
            matrix_struct(matrix, out, bias)
            for matrix, out, bias in zip(matrices, outs, biases or [None] * len(matrices), strict=True)
        )
    )
    call = c.ProductsStruct(
        threads(),
        len(rows),
        x.shape[-1],
        c.TYPES[x.dtype],
        rows.data_ptr(),
        rows.stride(0),
        structs,
        len(matrices),
    )
    kernels = library()
    assert kernels is not None
    if code := kernels.dll.headway_linear(ctypes.byref(call)):
        raise BackendError(f"the native kernel headway_linear failed: {c.ERRORS[code]}")
    return [out.view(*x.shape[:-1], out.shape[1]) for out in outs]


def matrix_struct(
    matrix: Matrix, out: Tensor, bias: Tensor | None, factor: Tensor | None = None, *, add: bool = False
) -> c.MatrixStruct:
    """Returns the struct for one matrix of a call; the tensors that it points to must outlive it. `factor`: float32
    [O], multiplied with each output (default: that of `Panels`). `add`: adds the product to what `out` holds."""
    scales = zeros = table = 0
    starts = nf4 = None
    if isinstance(matrix, Tensor):
        kind, weights, step = c.TYPES[matrix.dtype], matrix, matrix.stride(0) * matrix.element_size()
    elif isinstance(matrix, Compressed):
        kind, weights, step = c.COMPRESSED, matrix.data, 0
        starts, table = matrix.starts.data_ptr(), matrix.table
    elif isinstance(matrix, Nf4Matrix):
        kind, weights, step, nf4 = c.NF4, matrix.codes, matrix.codes.shape[1], ctypes.pointer(matrix.struct)
    elif isinstance(matrix, BlockPanels):
        kind, weights, step = BLOCKS[matrix.bits], matrix.data, matrix.data.shape[1]
    else:
        kind, weights, step = (c.INT8 if matrix.bits == 8 else c.INT4), matrix.data, matrix.data.shape[1]
        scales, zeros = int(matrix.has_scales), int(matrix.has_zeros)
        factor = matrix.factor if factor is None else factor
    return c.MatrixStruct(
        kind,
        _outputs(matrix),
        weights.data_ptr(),
        step,
        scales,
        zeros,
        None if factor is None else factor.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        int(add),
        starts,
        table,
        nf4,
    )


def _outputs(matrix: Matrix) -> int:
    return matrix.shape[0] if isinstance(matrix, Tensor) else matrix.outputs
