"""Rotary position embedding (Su et al. 2021, RoFormer) as a pure function of positions.

Axes: B batch, H heads, T tokens, D per head, d <= D rotated dims.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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
        """Radians per position of each pair, float64: [d/2], or [B, d/2] for a `length` of shape [B].

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
        return RotaryTable(cos, sin, self.pairing, dims)

    def rotate(self, x_BHTD: Tensor, position_BT: Tensor, length: int | Tensor | None = None) -> Tensor:
        """`x_BHTD`, queries or keys, turned by their positions; same dtype.

        position_BT   integers, [T] or [B or 1, T]
        length        [B] or a number: tokens in each row. Required where `length_dependent`; the result is
                      the same for every length elsewhere
        """
        return self.table(position_BT, x_BHTD.shape[-1], length, x_BHTD.dtype).apply(x_BHTD)


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """Cosines and sines [T, d/2] or [B or 1, T, d/2], amplitude included, of one set of positions."""

    cos: Tensor
    sin: Tensor
    pairing: Pairing
    dims: int

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
        cos, sin = self.cos.unsqueeze(-3), self.sin.unsqueeze(-3)
        turned, rest = x_BHTD[..., : self.dims].to(cos.dtype), x_BHTD[..., self.dims :]
        if self.pairing == "adjacent":
            a, b = turned.unflatten(-1, (-1, 2)).unbind(-1)
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        elif self.pairing == "halves":
            a, b = turned.chunk(2, -1)
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        else:
            pairs = torch.tensor(self.pairing, device=turned.device)
            a, b = turned[..., pairs[:, 0]], turned[..., pairs[:, 1]]
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
            out = out[..., pairs.T.flatten().argsort()]
        out = out.to(x_BHTD.dtype)
        return out if rest.shape[-1] == 0 else torch.cat((out, rest), -1)
