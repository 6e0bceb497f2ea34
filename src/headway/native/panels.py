"""Weights of 8 or 4 bits in the kernels' layout: panels of 16 outputs.

Legend: I inputs, O outputs, P = ceil(O / 16) panels, G = ceil(I / 32) groups.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headway.errors import BackendError
from headway.hardware import large_pages
from headway.quantization import QuantizedMatrix

PANEL, GROUP = 16, 32
AT_ONCE = 1 << 18
"""Number of weights that are packed at a time."""


class Panels(NamedTuple):
    """A quantized matrix in the kernels' layout.

    Attributes:
        data: uint8 [P, bytes of a panel]; for each group the codes of 32 inputs of 16 outputs, their scales, their
            zeros.
        bits: 8 or 4.
        outputs, inputs: O and I.
        has_scales, has_zeros: whether each group has its own; without zeros, the zero point is 128 or 8.
        factor: float32 [O], by which each output is multiplied.
        group: number of inputs that share a scale, a multiple of 32; I if a whole row shares one.
    """

    data: Tensor
    bits: int
    outputs: int
    inputs: int
    has_scales: bool
    has_zeros: bool
    factor: Tensor
    group: int

    @classmethod
    def pack(cls, matrix: QuantizedMatrix) -> "Panels":
        """Packs a quantized matrix. Group scales are divided by a power of two per row (`factor`) and kept as float16,
        rounded if they do not fit. Raises BackendError if groups are no multiples of 32 inputs."""
        outputs, inputs = matrix.codes.shape
        group_size = matrix.group if matrix.scale.shape[1] > 1 else None
        if group_size is not None and group_size % GROUP:
            raise BackendError(
                f"the kernels need a group size that is a multiple of {GROUP}, got {group_size}"
            )
        top = matrix.scale.abs().amax(1).float()
        power = torch.exp2(torch.floor(torch.log2(top.clamp_min(torch.finfo(torch.float32).tiny))))
        factor = power if group_size else matrix.scale[:, 0].float()
        panels_without_data = cls(
            torch.empty(0),
            matrix.bits,
            outputs,
            inputs,
            group_size is not None,
            matrix.zero is not None,
            factor,
            group_size or inputs,
        )
        size = -(-inputs // GROUP) * panels_without_data.group_bytes
        data = packed_panels(
            outputs, inputs, size, lambda rows: panels_without_data._packed(matrix, rows).flatten(1)
        )
        return panels_without_data._replace(data=data)

    @property
    def group_bytes(self) -> int:
        """Bytes of a group of 32 inputs in a panel."""
        return PANEL * (GROUP * self.bits // 8 + 2 * self.has_scales + self.has_zeros)

    def _packed(self, matrix: QuantizedMatrix, rows: slice) -> Tensor:
        """Packs these rows of a matrix into whole panels: uint8 [panels, G, group_bytes]."""
        codes = matrix.codes[rows]
        panels, groups, middle = -(-len(codes) // PANEL), -(-self.inputs // GROUP), 1 << self.bits - 1
        # Padding inputs are multiplied by zeros of x, so their code is arbitrary.
        words = _padded(codes, panels * PANEL, groups * GROUP, middle).view(panels, PANEL, groups, 8, 4)
        words = words.permute(0, 2, 3, 1, 4)  # [panels, G, 8, 16, 4]
        if self.bits == 4:
            quads = words.unflatten(2, (2, 2, 2))
            words = quads[:, :, :, 0] | quads[:, :, :, 1] << 4
        parts = [words.reshape(panels, groups, -1)]
        if self.has_scales:
            scale = (matrix.scale[rows].float() / self.factor[rows].unsqueeze(1)).half()
            halves = _of_groups(scale, panels, groups, self.group, 0).contiguous()
            parts.append(halves.view(torch.uint8).view(panels, groups, -1))
        if matrix.zero is not None:
            parts.append(_of_groups(matrix.zero[rows], panels, groups, self.group, 0))
        return torch.cat(parts, 2)

    def unpack(self, first: int = 0, count: int | None = None) -> QuantizedMatrix:
        """Returns the matrix of `count` panels (default: all) from panel `first` on, with the scales as they are
        stored."""
        data = self.data[first:] if count is None else self.data[first : first + count]
        outputs = min(len(data) * PANEL, self.outputs - first * PANEL)
        groups, size = -(-self.inputs // GROUP), PANEL * GROUP * self.bits // 8
        parts = data.view(len(data), groups, self.group_bytes)
        words = parts[:, :, :size].unflatten(2, (-1, PANEL, 4))
        if self.bits == 4:
            halves = words.unflatten(2, (2, 1, 2))
            words = torch.cat((halves & 15, halves >> 4), 3).flatten(2, 4)
        codes = words.permute(0, 3, 1, 2, 4).reshape(len(data) * PANEL, groups * GROUP)[
            :outputs, : self.inputs
        ]
        groups_per_scale = (
            groups if self.group == self.inputs else self.group // GROUP
        )  # groups of 32 inputs in one group of the matrix

        def of_rows(values: Tensor) -> Tensor:
            return values.transpose(1, 2).reshape(-1, groups)[:outputs, ::groups_per_scale].contiguous()

        scale = self.factor[first * PANEL :][:outputs].unsqueeze(1)
        if self.has_scales:
            floats = parts[:, :, size : size + 2 * PANEL].contiguous().view(torch.float16)
            scale = of_rows(floats).float() * scale
        zero = of_rows(parts[:, :, -PANEL:]) if self.has_zeros else None
        return QuantizedMatrix(codes.contiguous(), scale, zero, self.bits, self.group)

    def rows(self, at: Tensor) -> Tensor:
        """Returns the rows [n, I] with the indices `at` [n], in float32; only panels that contain one of them are
        unpacked."""
        panels, places = panels_of(at)
        numbers = panels[:, None] * PANEL + torch.arange(PANEL, device=panels.device)
        factor = self.factor[numbers.flatten().clamp_max(self.outputs - 1)]
        subset = self._replace(data=self.data[panels], outputs=len(panels) * PANEL, factor=factor)
        return subset.unpack().dequantize()[places]


def packed_panels(outputs: int, inputs: int, size: int, pack: Callable[[slice], Tensor]) -> Tensor:
    """Returns uint8 [P, size], where `pack` returns some rows of the matrix as whole panels, [panels, size].

    The result is allocated before the temporaries, which are made for a few panels at a time: freeing them leaves no
    holes in the heap below it."""
    panels = -(-outputs // PANEL)
    data = torch.empty(panels, size, dtype=torch.uint8)
    large_pages([data])
    step = max(1, AT_ONCE // (PANEL * inputs))
    for first in range(0, panels, step):
        data[first : first + step] = pack(slice(first * PANEL, (first + step) * PANEL))
    return data


def panels_of(at: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the panels that contain some of the rows `at` [n], in order, and the place of each row among the rows of
    these panels, [n]."""
    # rows 40 and 3: panels 0 and 2, of rows 0 .. 15 and 32 .. 47, where they are at 16 + 8 and 3
    panels, numbers = (at // PANEL).unique(return_inverse=True)
    return panels, numbers * PANEL + at % PANEL


def panel_bytes(outputs: int, inputs: int, bits: int, scales: bool) -> int:
    """Returns the bytes of `Panels` without zeros, with group scales if `scales`."""
    weights = -(-outputs // PANEL) * PANEL * -(-inputs // GROUP) * (GROUP * bits // 8 + 2 * scales)
    return weights + 4 * outputs


def _padded(t: Tensor, rows: int, columns: int, value: int) -> Tensor:
    out = t.new_full((rows, columns), value)
    out[: t.shape[0], : t.shape[1]] = t
    return out


def _of_groups(values: Tensor, panels: int, groups: int, each: int, empty: int) -> Tensor:
    """Reorders values [O, groups of `each` inputs] to [P, G, 16], repeated for each 32 inputs and padded with
    `empty`."""
    spread = values.repeat_interleave(-(-each // GROUP), 1)[:, :groups]
    return _padded(spread, panels * PANEL, groups, empty).view(panels, PANEL, groups).transpose(1, 2)
