"""Writes products of 1 to 64 rows with weights of every type as cases for driver.cpp, with float64 results. Needs no
kernel of this machine, except for weights that only kernels pack.

    python -m tests.native.arm.products FILE [--rows ROWS ...]"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headway.block_quantization import PARTS
from headway.native import loader
from headway.native.block_panels import BlockPanels
from headway.native.compressed import Compressed
from headway.native.linear import Matrix, linear
from headway.native.panels import Panels
from headway.nn.weights import Nf4
from headway.quantization import QuantizedMatrix, quantize_weights
from tests.native.arm.calls import Taken, running
from tests.native.arm.files import CaseFile
from tests.native.weights import drawn, rounded
from tests.tolerance import ulp

OUTPUTS, INPUTS = 35, 256
FORMS = [(8, None, True), (8, None, False), (8, 32, True), (4, 32, True), (4, 32, False), (4, 128, False)]
"""(bits, group, symmetric)."""
Named = tuple[str, Matrix, Tensor, bool]
"""A name, a matrix, its numbers in float64, and whether rows are rounded to 8 bits for it."""


def matrices(
    dtype: torch.dtype, generator: torch.Generator, outputs: int = OUTPUTS, inputs: int = INPUTS
) -> Iterator[Named]:
    w = torch.randn(outputs, inputs, generator=generator)
    yield "float32", w, w.double(), False
    half = w.bfloat16()
    yield "bf16", half, half.double(), False
    if loader.search.__wrapped__().library:
        yield "compressed bf16", Compressed.pack(half), half.double(), False
    nf4 = Nf4.pack(w)
    native = nf4.native()
    assert native is not None
    yield "nf4", native, nf4.dequantize(dtype).double(), False
    for bits, group, symmetric in FORMS:
        quantized = quantize_weights(w, bits, group, symmetric=symmetric)
        if group:
            quantized = QuantizedMatrix(
                quantized.codes, quantized.scale.half().float(), quantized.zero, bits, quantized.group
            )
        name = f"{bits} bits, {group or 'rows'}, {'symmetric' if symmetric else 'with zeros'}"
        yield name, Panels.pack(quantized), quantized.dequantize(torch.float64), True
    for bits in sorted(PARTS):
        blocks = drawn(outputs, inputs, bits)
        yield f"q{bits}_K", BlockPanels.pack(blocks), blocks.dequantize(torch.float64), True


def sizes(matrix: Matrix, w: Tensor) -> Tensor:
    """Returns the magnitude of a product's terms: for blocks, larger than that of their sums."""
    return 4 * w.abs() + 0.2 if isinstance(matrix, BlockPanels) else w.abs()


def write(file: CaseFile, x: Tensor, named: list[Named]) -> None:
    """Writes one call with all matrices."""
    rows, dtype = len(x), x.dtype
    dll = Taken()
    with running(dll):
        outs = linear(x, [matrix for _, matrix, _, _ in named])
    (call,) = dll.calls
    for address, data in call.before.items():
        file.memory(address, data)
    file.links(call.links.items())
    file.call(call)
    kind = str(dtype).removeprefix("torch.")
    q, scale = rounded(x)
    rounded_x = (q.double() * scale.double().unsqueeze(2)).flatten(1)
    for (name, matrix, w, in_bytes), out in zip(named, outs, strict=True):
        inputs = rounded_x if in_bytes else x.double()
        expected, tolerances = inputs @ w.T, 2.0**-23 * (inputs.abs() @ sizes(matrix, w).T)
        if dtype == torch.bfloat16:
            tolerances = 2 * tolerances + 0.51 * ulp(expected, dtype)
        check = f"{rows} rows of {kind} by {name}"
        numbers = (t.flatten().numpy() for t in (expected, tolerances))
        file.check(check, out.data_ptr(), kind, np.arange(out.numel()), *numbers)
    file.end(f"products of {rows} rows")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.native.arm.products")
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=range(1, 65))
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    with CaseFile(options.file) as file:
        for dtype in (torch.float32, torch.bfloat16):
            named = list(matrices(dtype, generator))
            for rows in options.rows:
                write(file, torch.randn(rows, INPUTS, generator=generator).to(dtype), named)
        print(f"{file.cases} cases, {file.checks} checks of {file.numbers} numbers")


if __name__ == "__main__":
    main()
