"""Rotary position embedding (Su et al. 2021, RoFormer) as a pure function of positions.

Axes: B batch, H heads, T tokens, D per head, d <= D rotated dims.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.positions.pairing import Pairing, checked_pairing, coordinate_pairs
from headway.positions.scaling import Scaling
from headway.positions.schemes import PositionScheme, checked_theta, exact_positions, powers


@dataclass(frozen=True)
class Rotary(PositionScheme):
    """Pair i of a query or key at position p is turned by the angle p * f_i; their product then depends on
    the difference of positions only: (R_m q)^T (R_n k) = q^T R_(n-m) k.

        (a, b) -> amplitude * (a cos(p f_i) - b sin(p f_i),  b cos(p f_i) + a sin(p f_i))
        f_i = theta^(-2i/d),  0 <= i < d/2

    theta      base of the frequencies, >= 1
    pairing    which coordinates are (a, b): "adjacent", "halves" or explicit pairs. Required: nothing in a
               checkpoint's numbers reveals it
    dims       d: only the first `dims` of D are turned (partial rotary); None = all of D
    scaling    rule that changes the frequencies for longer contexts, and their `amplitude`

    Angles are float64 (positions are exact to 2^53, negative ones included); cosines and sines are rounded
    once, to float32, or float64 for float64 inputs. Half-precision inputs are turned in float32 and rounded
    once.
    """

    theta: float = 10000.0
    pairing: Pairing = field(kw_only=True)
    dims: int | None = field(default=None, kw_only=True)
    scaling: Scaling | None = field(default=None, kw_only=True)
    marks = "queries and keys"

    def __post_init__(self) -> None:
        object.__setattr__(self, "theta", checked_theta(self.theta, "Rotary"))
        object.__setattr__(self, "pairing", checked_pairing(self.pairing))
        if self.dims is not None:
            coordinate_pairs(self.pairing, self.dims)
        if self.scaling is not None and not isinstance(self.scaling, Scaling):
            raise ConfigError(f"Rotary: scaling must be a Scaling such as Linear(2.0), got {self.scaling!r}")

    @property
    def length_dependent(self) -> bool:
        """Whether frequencies depend on a row's length: caches then hold keys that are not yet turned."""
        return self.scaling is not None and self.scaling.length_dependent

    @property
    def amplitude(self) -> float:
        """Factor on turned queries and keys, so its square is on their scores; 1 without a scaling that says
        else.
        """
        return 1.0 if self.scaling is None else self.scaling.amplitude

    def with_pairing(self, pairing: Pairing) -> Rotary:
        """The same rotation in another basis; weights need `to_pairing` to match."""
        return replace(self, pairing=pairing)

    def rotated_dims(self, head_dim: int) -> int:
        """d for heads of `head_dim`. Raises ConfigError when it is odd, or does not fit."""
        dims = head_dim if self.dims is None else self.dims
        if dims % 2:
            raise ConfigError(
                f"Rotary: head_dim {head_dim} is odd, and coordinates turn in pairs; "
                f"use an even head_dim, or dims={max(head_dim - 1, 2)} to turn only a prefix"
            )
        if dims > head_dim:
            raise ConfigError(f"Rotary: dims={dims} does not fit heads of {head_dim}")
        if not isinstance(self.pairing, str):
            coordinate_pairs(self.pairing, dims)
        return dims

    def frequencies(self, head_dim: int, length: int | Tensor | None = None) -> Tensor:
        """Radians per position of each pair, float64: [d/2], or [..., d/2] for a `length` of shape [...].

        `length` (tokens in the row) matters only where `length_dependent`; None asks for rows within the
        trained context.
        """
        dims = self.rotated_dims(head_dim)
        length = torch.tensor(length) if isinstance(length, int) else length
        if self.scaling is None:
            return powers(self.theta, dims, None if length is None else length.device)
        return self.scaling.frequencies(self.theta, dims, length)

    def table(
        self,
        position: Tensor,
        head_dim: int,
        length: int | Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> RotaryTable:
        """Cosines and sines of `position` ([T], or [B or 1, T]: every row its own), to turn queries and keys
        with.

        One table serves the queries and keys of all layers that share positions. `length`: see `rotate`.
        """
        if position.dim() not in (1, 2):
            raise ConfigError(f"Rotary: positions must be [T] or [B, T], got shape {tuple(position.shape)}")
        if self.length_dependent and length is None:
            raise ConfigError(
                f"Rotary: {type(self.scaling).__name__} depends on each row's length; give length, "
                "the number of tokens of each row as [B] (or one number for all)"
            )
        dims = self.rotated_dims(head_dim)
        if self.length_dependent:
            rows = torch.as_tensor(length, device=position.device)
            frequency = self.frequencies(head_dim, rows)
        else:
            frequency = self.frequencies(head_dim).to(position.device)
        if frequency.dim() == 2:
            frequency = frequency[:, None]
        angle = exact_positions(position)[..., None] * frequency
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        cos, sin = (angle.cos() * self.amplitude).to(kept), (angle.sin() * self.amplitude).to(kept)
        return RotaryTable.of(cos, sin, self.pairing, dims)

    def rotate(self, x_BHTD: Tensor, position_BT: Tensor, length: int | Tensor | None = None) -> Tensor:
        """`x_BHTD`, queries or keys, turned by their positions; same dtype.

        position_BT   integers, [T] or [B or 1, T]
        length        [B] or a number: tokens in each row; [B or 1, T]: in each token's document, where
                      documents are packed. Required where `length_dependent`; the result is
                      the same for every length elsewhere
        """
        return self.table(position_BT, x_BHTD.shape[-1], length, x_BHTD.dtype).apply(x_BHTD)


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """Cosines and sines of one set of positions, amplitude included, laid out by coordinate: x * cos +
    partner * sin.

    cos, sin   [T, d] or [B or 1, T, d]; the sine is negated for the first coordinate of each pair
    partner    where each coordinate's partner is [d], for explicit pairs
    cis        the same numbers as complex [.., T, d/2] for neighbours, which multiply fastest that way
    """

    cos: Tensor
    sin: Tensor
    pairing: Pairing
    dims: int
    partner: Tensor | None = None
    cis: Tensor | None = None

    @staticmethod
    def of(cos: Tensor, sin: Tensor, pairing: Pairing, dims: int) -> RotaryTable:
        """The table of cosines and sines [.., T, d/2] of each pair."""
        if pairing == "halves":
            return RotaryTable(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), pairing, dims)
        if pairing == "adjacent":
            # complex numbers keep compilers from fusing
            cis = None if torch.compiler.is_compiling() else torch.complex(cos, sin)
            twice = cos.repeat_interleave(2, -1)
            return RotaryTable(twice, torch.stack((-sin, sin), -1).flatten(-2), pairing, dims, cis=cis)
        order = torch.tensor(coordinate_pairs(pairing, dims), device=cos.device).T
        at, partner = order.flatten().argsort(), order.flip(0).flatten()
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return RotaryTable(cos[..., at], sin[..., at], pairing, dims, partner=partner[at])

    def apply(self, x_BHTD: Tensor) -> Tensor:
        """Turn queries or keys [B, H, T, D]; same dtype, computed in the table's precision or better."""
        if x_BHTD.dim() != 4 or x_BHTD.shape[2] != self.cos.shape[-2] or x_BHTD.shape[-1] < self.dims:
            raise ConfigError(
                f"Rotary: queries and keys are [B, H, T, D] with T = {self.cos.shape[-2]} positions and "
                f"D >= {self.dims}, got {tuple(x_BHTD.shape)}"
            )
        if self.cos.dim() == 3 and self.cos.shape[0] not in (1, x_BHTD.shape[0]):
            raise ConfigError(
                f"Rotary: positions (or lengths) of {self.cos.shape[0]} rows do not fit "
                f"a batch of {x_BHTD.shape[0]}"
            )
        turned, rest = x_BHTD[..., : self.dims], x_BHTD[..., self.dims :]
        cos, sin = self.cos.unsqueeze(-3), self.sin.unsqueeze(-3)
        if self.pairing == "halves" and not torch.compiler.is_compiling():
            out = _TurnHalves.apply(turned, cos, sin)  # type: ignore[no-untyped-call]
        else:
            out = self._turn(turned.to(cos.dtype), cos, sin).to(x_BHTD.dtype)
        return out if rest.shape[-1] == 0 else torch.cat((out, rest), -1)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.cis is not None:
            pairs = _even_strides(x).unflatten(-1, (-1, 2))
            return torch.view_as_real(torch.view_as_complex(pairs) * self.cis.unsqueeze(-3)).flatten(-2)
        if self.pairing == "halves":
            partner = torch.cat((x[..., self.dims // 2 :], x[..., : self.dims // 2]), -1)
        elif self.pairing == "adjacent":
            partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            partner = x[..., self.partner]
        return torch.addcmul(x * cos, partner, sin)


class _TurnHalves(torch.autograd.Function):
    """x * cos + partner(x) * sin without the copies that autograd's own graph makes (three times as fast)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        wide, half = x.to(cos.dtype), x.shape[-1] // 2
        out = wide * cos
        out[..., :half].addcmul_(wide[..., half:], sin[..., :half])
        out[..., half:].addcmul_(wide[..., :half], sin[..., half:])
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        # the transpose of a turn turns back
        grad: Tensor = _TurnHalves.apply(grads[0], cos, -sin)  # type: ignore[no-untyped-call]
        return grad, None, None


def _even_strides(x: Tensor) -> Tensor:
    """`x` as it is where neighbours can be viewed as complex numbers, else a copy."""
    fits = x.stride(-1) == 1 and not x.storage_offset() % 2 and not any(s % 2 for s in x.stride()[:-1])
    return x if fits else x.contiguous()
