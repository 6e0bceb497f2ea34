"""NF4 weights for the kernels, which read them in the layout of `headway.nn.weights.Nf4`, without repacking.

Legend: O outputs, I inputs.
"""

from torch import Tensor

from headway.native import interface as c


class Nf4Matrix:
    """A matrix of 4-bit NF4 codes, I a multiple of 64; see `headway_nf4` in `csrc/headway.h`.

    Attributes:
        codes: uint8 [O, I / 2], two codes per byte, the first in the high bits.
        outputs, inputs: O and I.
        struct: the tables that dequantize the codes; valid as long as this object lives.
    """

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        values: Tensor,
        scale_values: Tensor,
        largest: Tensor,
        offset: float,
        first: int = 0,
        row: int | None = None,
    ) -> None:
        self.codes, self.outputs, self.inputs = codes, codes.shape[0], 2 * codes.shape[1]
        self._tensors = scales, values, scale_values, largest
        assert all(t.is_contiguous() for t in (codes, *self._tensors))
        self.struct = c.Nf4Struct(
            values.data_ptr(), scales.data_ptr(), scale_values.data_ptr(), largest.data_ptr(),
            offset, first, scales.shape[1] if row is None else row,
        )  # fmt: skip
