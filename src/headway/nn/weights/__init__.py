"""The forms of a linear layer's weights, by name.

Products, adapters, sharing and native steps depend on the class of a form; the contents of files on `from_codes` and
`headway.checkpoints.quantized`; and the choices of `headway quantize` on `headway.models.quantize.KINDS`."""

from headway.block_quantization import BLOCK, BlockMatrix, CodedMatrix
from headway.native.block_panels import BlockPanels, block_bytes
from headway.native.panels import PANEL, Panels, panel_bytes
from headway.nn.weights.base import Weight
from headway.nn.weights.blocks import Q4K, Q5K, Q6K, BlockQuantized
from headway.nn.weights.compressed import CompressedWeight
from headway.nn.weights.nf4 import Nf4
from headway.nn.weights.plain import Plain
from headway.nn.weights.rounded import Int4, Int8, Packed, Rounded

WEIGHTS: dict[str, type[Weight]] = {
    form.name: form for form in (Plain, CompressedWeight, Int8, Int4, Nf4, Q4K, Q5K, Q6K)
}
"""Every form, by its name."""


def from_codes(matrix: CodedMatrix) -> Packed:
    """Returns a weight with existing codes and scales, unchanged. Raises BackendError for groups that the kernels do
    not support."""
    if isinstance(matrix, BlockMatrix):
        return {4: Q4K, 5: Q5K, 6: Q6K}[matrix.bits](BlockPanels.pack(matrix))
    return (Int8 if matrix.bits == 8 else Int4)(Panels.pack(matrix))


def code_bytes(form: str, outputs: int, inputs: int) -> int:
    """Returns the bytes of a matrix [outputs, inputs] in a form of `WEIGHTS` that has codes, with a scale for each
    32 inputs or fewer."""
    kind = WEIGHTS[form]
    if issubclass(kind, BlockQuantized):
        return -(-outputs // PANEL) * (inputs // BLOCK) * block_bytes(kind.bits)
    assert issubclass(kind, Rounded), form
    return panel_bytes(outputs, inputs, kind.bits, True)


__all__ = [
    "WEIGHTS",
    "BlockQuantized",
    "CompressedWeight",
    "Int4",
    "Int8",
    "Nf4",
    "Packed",
    "Plain",
    "Rounded",
    "Weight",
    "code_bytes",
    "from_codes",
]
