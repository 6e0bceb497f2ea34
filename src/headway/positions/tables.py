"""Tables that rotate queries and keys: computed once for one set of positions and applied in every layer.

Axes: B batch, H heads, T tokens, D per head, d <= D rotated dims.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.positions.pairing import Pairing, coordinate_pairs


class Rotation(ABC):
    """Rotates queries and keys, and values if `rotates_values`, at the positions that it was made for.

    Queries must also be multiplied by `query_factor`, [T] or [B or 1, T], unless it is None."""

    rotates_values: bool
    query_factor: Tensor | None = None

    @abstractmethod
    def apply(self, x_BHTD: Tensor) -> Tensor:
        """Returns rotated queries, keys or values [B, H, T, D]; same dtype, computed in the table's precision or
        better."""


@dataclass(frozen=True, eq=False)
class RotaryTable(Rotation):
    """Cosines and sines of one set of positions, amplitude included, one per coordinate, as `rotate` takes them.

    cos, sin   [T, d] or [B or 1, T, d]; the sine is negated for the first coordinate of each pair
    pairing    "halves", "adjacent", or the index of each coordinate's partner, int64 [d]
    rotates_values   whether values are rotated, too
    """

    cos: Tensor
    sin: Tensor
    pairing: str | Tensor
    rotates_values: bool = False
    query_factor: Tensor | None = None

    @staticmethod
    def of(
        cos: Tensor, sin: Tensor, pairing: Pairing, dims: int, rotates_values: bool = False
    ) -> "RotaryTable":
        """Returns the table for cosines and sines [.., T, d/2] of each pair."""
        if pairing == "adjacent":
            repeated, signed = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
            return RotaryTable(repeated, signed, "adjacent", rotates_values)
        repeated, signed = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        if pairing == "halves":
            return RotaryTable(repeated, signed, "halves", rotates_values)
        # pairs (0, 3), (2, 1): order [[0, 2], [3, 1]], pair_index [0, 3, 1, 2], partners [3, 2, 1, 0]
        order = torch.tensor(coordinate_pairs(pairing, dims), device=cos.device).T
        pair_index, partner = order.flatten().argsort(), order.flip(0).flatten()
        return RotaryTable(
            repeated[..., pair_index], signed[..., pair_index], partner[pair_index], rotates_values
        )

    @property
    def dims(self) -> int:
        """Number of rotated coordinates, d."""
        return self.cos.shape[-1]

    def check(self, x_BHTD: Tensor) -> None:
        """Raises ConfigError for a tensor with another number of positions, or with fewer than d coordinates."""
        _check(x_BHTD, self.cos.shape[:-1], self.dims)

    def apply(self, x_BHTD: Tensor) -> Tensor:
        self.check(x_BHTD)
        return rotate(x_BHTD, self.cos, self.sin, self.pairing)


def rotate(x_BHTD: Tensor, cos: Tensor, sin: Tensor, pairing: str | Tensor) -> Tensor:
    """Returns x cos + partner(x) sin for the first d coordinates of each head, and the others unchanged.

    Computed in the dtype of cos, and rounded once to that of x. Angles and pairing as in `RotaryTable`. (Su et al.
    2021, section 3.4.2.)"""
    cos, sin, size = cos.unsqueeze(-3), sin.unsqueeze(-3), cos.shape[-1]
    part = x_BHTD[..., :size].to(cos.dtype)
    if isinstance(pairing, Tensor):
        partner = part[..., pairing]
    elif pairing == "halves":
        partner = part.roll(size // 2, -1)
    else:
        partner = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    out = torch.addcmul(part * cos, partner, sin).to(x_BHTD.dtype)
    return out if size == x_BHTD.shape[-1] else _joined(out, x_BHTD[..., size:])


@dataclass(frozen=True, eq=False)
class MatrixTable(Rotation):
    """A full rotation matrix for each of one set of positions.

    matrix         [T, d, d] or [B or 1, T, d, d]
    dims           d: later coordinates are unchanged
    rotates_values   whether values are rotated, too
    """

    matrix: Tensor
    dims: int
    rotates_values: bool = False

    def apply(self, x_BHTD: Tensor) -> Tensor:
        _check(x_BHTD, self.matrix.shape[:-2], self.dims)
        rotated, unrotated = x_BHTD[..., : self.dims], x_BHTD[..., self.dims :]
        out = torch.einsum("...tij,...htj->...hti", self.matrix, rotated.to(self.matrix.dtype))
        out = out.to(x_BHTD.dtype)
        return out if unrotated.shape[-1] == 0 else _joined(out, unrotated)


def _joined(rotated: Tensor, rest: Tensor) -> Tensor:
    """Concatenates the coordinates to [B, H, T, D], with a token's heads contiguous in memory, as projections lay them
    out."""
    return torch.cat((rotated.transpose(1, 2), rest.transpose(1, 2)), -1).transpose(1, 2)


def _check(x: Tensor, positions: torch.Size, dims: int) -> None:
    if x.dim() != 4 or x.shape[2] != positions[-1] or x.shape[-1] < dims:
        raise ConfigError(
            f"Rotary: queries and keys are [B, H, T, D] with T = {positions[-1]} positions and "
            f"D >= {dims}, got {tuple(x.shape)}"
        )
    if len(positions) == 2 and positions[0] not in (1, x.shape[0]):
        raise ConfigError(
            f"Rotary: positions (or lengths) of {positions[0]} rows do not fit a batch of {x.shape[0]}"
        )
