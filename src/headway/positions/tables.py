"""What rotates queries and keys: the numbers of one set of positions, made once and applied in every layer.

Axes: B batch, H heads, T tokens, D per head, d <= D rotated dims.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.positions.pairing import Pairing, coordinate_pairs


class Rotation(ABC):
    """Rotates queries and keys, and values where `rotates_values`, at the positions that it was made for."""

    rotates_values: bool

    @abstractmethod
    def apply(self, x_BHTD: Tensor) -> Tensor:
        """Rotated queries, keys or values [B, H, T, D]; same dtype, computed in the table's precision or better."""


@dataclass(frozen=True, eq=False)
class RotaryTable(Rotation):
    """Cosines and sines of one set of positions, amplitude included, laid out by coordinate: x * cos +
    partner * sin.

    cos, sin   [T, d] or [B or 1, T, d]; the sine is negated for the first coordinate of each pair
    partner    where each coordinate's partner is [d], for explicit pairs
    rotates_values   whether values are rotated with it, too
    """

    cos: Tensor
    sin: Tensor
    pairing: Pairing
    dims: int
    partner: Tensor | None = None
    rotates_values: bool = False

    @staticmethod
    def of(
        cos: Tensor, sin: Tensor, pairing: Pairing, dims: int, rotates_values: bool = False
    ) -> RotaryTable:
        """The table of cosines and sines [.., T, d/2] of each pair."""
        partner = None
        twice, signed = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        if pairing == "adjacent":
            twice, signed = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
        elif pairing != "halves":
            order = torch.tensor(coordinate_pairs(pairing, dims), device=cos.device).T
            at, partner = order.flatten().argsort(), order.flip(0).flatten()
            twice, signed, partner = twice[..., at], signed[..., at], partner[at]
        return RotaryTable(twice, signed, pairing, dims, partner, rotates_values)

    def check(self, x_BHTD: Tensor) -> None:
        """ConfigError unless these can be rotated: of other positions, or with fewer than d numbers."""
        _check(x_BHTD, self.cos.shape[:-1], self.dims)

    def apply(self, x_BHTD: Tensor) -> Tensor:
        self.check(x_BHTD)
        whole = x_BHTD.shape[-1] == self.dims
        rotated = x_BHTD if whole else x_BHTD[..., : self.dims]
        cos, sin = self.cos.unsqueeze(-3), self.sin.unsqueeze(-3)
        if self.pairing != "halves" or cos.requires_grad or torch.compiler.is_compiling():
            out = self._rotate(rotated.to(cos.dtype), cos, sin).to(x_BHTD.dtype)
        elif x_BHTD.requires_grad and torch.is_grad_enabled():
            out = _RotateHalves.apply(rotated, cos, sin)  # type: ignore[no-untyped-call]
        else:
            out = _rotate_halves(rotated, cos, sin)
        return out if whole else _joined(out, x_BHTD[..., self.dims :])

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.pairing == "halves":
            partner = torch.cat((x[..., self.dims // 2 :], x[..., : self.dims // 2]), -1)
        elif self.pairing == "adjacent":
            partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            partner = x[..., self.partner]
        return torch.addcmul(x * cos, partner, sin)


@dataclass(frozen=True, eq=False)
class MatrixTable(Rotation):
    """A whole matrix for each of one set of positions.

    matrix         [T, d, d] or [B or 1, T, d, d]
    dims           d: coordinates behind it stay as they are
    rotates_values   whether values are rotated with it, too
    """

    matrix: Tensor
    dims: int
    rotates_values: bool = False

    def apply(self, x_BHTD: Tensor) -> Tensor:
        _check(x_BHTD, self.matrix.shape[:-2], self.dims)
        rotated, rest = x_BHTD[..., : self.dims], x_BHTD[..., self.dims :]
        out = torch.einsum("...tij,...htj->...hti", self.matrix, rotated.to(self.matrix.dtype)).to(
            x_BHTD.dtype
        )
        return out if rest.shape[-1] == 0 else _joined(out, rest)


def _joined(rotated: Tensor, rest: Tensor) -> Tensor:
    """[B, H, T, D], with the heads of a token side by side in memory, as projections give them."""
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


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + partner(x) * sin."""
    wide, half = x.to(cos.dtype), x.shape[-1] // 2
    out = wide * cos
    out[..., :half].addcmul_(wide[..., half:], sin[..., :half])
    out[..., half:].addcmul_(wide[..., :half], sin[..., half:])
    return out.to(x.dtype)


class _RotateHalves(torch.autograd.Function):
    """`_rotate_halves` without the copies that autograd's own graph makes (three times as fast)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_halves(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        # the transpose of a rotation rotates back
        grad: Tensor = _RotateHalves.apply(grads[0], cos, -sin)  # type: ignore[no-untyped-call]
        return grad, None, None
