"""Weights of 4 to 6 bits in blocks of 256 inputs, as in llama.cpp's files: K-quants."""

from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from headway.block_quantization import BLOCK, quantize_blocks
from headway.errors import BackendError
from headway.native.block_panels import BlockPanels
from headway.nn.weights.rounded import Packed


@dataclass(frozen=True, eq=False)
class BlockQuantized(Packed):
    """W' [O, I] = (d s) code - (dmin t), or (d s) (code - 32), as defined in `headway.block_quantization`; I is a
    multiple of 256. Products are those of `Packed`, with exact sums over 32 inputs, or over 16 if codes have 6 bits."""

    bits: ClassVar[int]
    group: ClassVar[int] = BLOCK
    panels: BlockPanels

    @classmethod
    def pack(cls, w: Tensor) -> Self:
        """See `Weight`: takes the nearest codes (`quantize_blocks`). Raises BackendError if rows are not whole
        blocks."""
        if w.shape[1] % BLOCK:
            raise BackendError(
                f"{cls.name} needs a multiple of {BLOCK} inputs (whole blocks), got {w.shape[1]}"
            )
        return cls(BlockPanels.pack(quantize_blocks(w.detach(), cls.bits)))

    def tensors(self) -> dict[str, Tensor]:
        """See `Weight`."""
        return {"codes": self.panels.data}

    def with_tensors(self, tensors: dict[str, Tensor]) -> Self:
        """See `Weight`."""
        return type(self)(self.panels._replace(data=tensors["codes"]))


class Q4K(BlockQuantized):
    """Codes of 4 bits, with minimums: 4.62 bits a weight."""

    name, bits = "q4_K", 4


class Q5K(BlockQuantized):
    """Codes of 5 bits, with minimums: 5.62 bits a weight."""

    name, bits = "q5_K", 5


class Q6K(BlockQuantized):
    """Signed codes of 6 bits: 6.56 bits a weight."""

    name, bits = "q6_K", 6
