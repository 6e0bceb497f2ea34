"""Rotary position embedding (Su et al. 2021, RoFormer) as a pure function of positions.

Axes: B batch, H heads, T tokens, D per head, d <= D rotated dims.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import torch
from torch import Tensor

from headway.errors import ConfigError, check_known
from headway.positions.pairing import Pairing, checked_pairing, coordinate_pairs
from headway.positions.scaling import Scaling
from headway.positions.schemes import PositionScheme, checked_theta, exact_positions, powers
from headway.positions.tables import RotaryTable

Schedule = Literal["powers", "linear", "quadratic", "cosine", "equal"] | tuple[float, ...]
"""
f_i of pair i, 0 <= i < d/2, with x = 2i/d                                decay(256), d = 128
"powers"      theta^-x               (Su et al. 2021, section 3.2.2)               6.54
"linear"      1 - x                                                                0.70
"quadratic"   (1 - x)^2                                                            5.50
"cosine"      (1 + cos(pi x)) / 2                                                  6.80
"equal"       1: a distance and the same plus 2 pi cannot be told apart           32.50, as at 0
numbers       d/2 radians per position, one for each pair

Almost any smooth monotone f makes products fade with distance (Su et al. 2021, section 3.4.3, whose figure is
`decay`); equal ones do not.
"""

_OF_X: Mapping[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: 1 - x,
    "quadratic": lambda x: (1 - x).square(),
    "cosine": lambda x: (1 + torch.cos(math.pi * x)) / 2,
    "equal": torch.ones_like,
}


@dataclass(frozen=True)
class Rotary(PositionScheme):
    """Rotates pair i of a query or key at position p by the angle p * f_i; their product then depends on the difference
    of positions only: (R_m q)^T (R_n k) = q^T R_(n-m) k.

        (a, b) -> amplitude * (a cos(p f_i) - b sin(p f_i),  b cos(p f_i) + a sin(p f_i))
        f_i = theta^(-2i/d),  0 <= i < d/2, unless `schedule` defines others

    theta      base of the frequencies, >= 1
    pairing    which coordinates are (a, b): "adjacent", "halves" or explicit pairs. Required, since nothing in a
               checkpoint's numbers reveals it
    dims       d: only the first `dims` of D are rotated (partial rotary); None = all of D
    scaling    rule that changes the frequencies for longer contexts, and their `amplitude`
    schedule   the frequencies, by the name of a rule or as d/2 numbers (`Schedule`); theta is that of "powers"
    trainable  whether the frequencies are trained, starting from the schedule; each layer has its own
               (`nn.RotaryEmbedding`)
    values     whether values are rotated, too, each by its own position (RoFormer's `rotary_value`); outputs are not
               rotated back, so they depend on absolute positions
    query_growth   (b, n): rotated queries at position p are multiplied by 1 + b ln(1 + floor(p / n)) (Llama 4); None:
                   no factor

    Raises ConfigError for impossible combinations: a theta, or a scaling, with a schedule other than "powers"; trained
    frequencies with a scaling; rotated values with a scaling that has an amplitude or depends on lengths.

    Angles are float64 (positions are exact to 2^53, negative ones included); cosines and sines are rounded once, to
    float32, or float64 for float64 inputs. Half-precision inputs are rotated in float32 and rounded once.
    """

    theta: float = 10000.0
    pairing: Pairing = field(kw_only=True)
    dims: int | None = field(default=None, kw_only=True)
    scaling: Scaling | None = field(default=None, kw_only=True)
    schedule: Schedule = field(default="powers", kw_only=True)
    trainable: bool = field(default=False, kw_only=True)
    values: bool = field(default=False, kw_only=True)
    query_growth: tuple[float, int] | None = field(default=None, kw_only=True)
    marks = "queries and keys"

    def __post_init__(self) -> None:
        object.__setattr__(self, "theta", checked_theta(self.theta, "Rotary"))
        object.__setattr__(self, "pairing", checked_pairing(self.pairing))
        object.__setattr__(self, "schedule", _checked_schedule(self.schedule))
        if self.dims is not None:
            coordinate_pairs(self.pairing, self.dims)
            _scheduled(self.schedule, self.theta, self.dims)
        if self.schedule != "powers" and self.theta != 10000.0:
            raise ConfigError(
                f'Rotary: theta={self.theta:g} is the base of schedule "powers", but the schedule is '
                f"{self.schedule!r}; drop one of them"
            )
        for name in ("trainable", "values"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"Rotary: {name} must be True or False, got {getattr(self, name)!r}")
        if self.query_growth is not None:
            growth, span = self.query_growth
            if not (_is_number(growth) and growth >= 0 and type(span) is int and span >= 1):
                raise ConfigError(
                    f"Rotary: query_growth must be (b >= 0, integer n >= 1), got {self.query_growth!r}"
                )
            object.__setattr__(self, "query_growth", (float(growth), span))
        if self.scaling is not None:
            self._check_scaling(self.scaling)

    def _check_scaling(self, scaling: Scaling) -> None:
        if not isinstance(scaling, Scaling):
            raise ConfigError(
                f"Rotary: scaling must be a Scaling such as LinearScaling(2.0), got {scaling!r}"
            )
        kind = type(scaling).__name__
        if self.schedule != "powers":
            raise ConfigError(
                f'Rotary: {kind} is a rule for frequencies of schedule "powers", but the schedule is '
                f"{self.schedule!r}; drop one of them"
            )
        if self.trainable:
            raise ConfigError(
                f"Rotary: {kind} computes the frequencies anew, and trainable=True trains them; drop one of them"
            )
        if self.values and scaling.length_dependent:
            raise ConfigError(
                f"Rotary: under {kind} rotations change as a row grows, and values in a cache are not rotated again; "
                "drop values=True or the scaling"
            )
        if self.values and scaling.amplitude != 1:
            raise ConfigError(
                f"Rotary: {kind} has amplitude {scaling.amplitude:.6g}, meant for scores, and values=True would "
                "multiply values by it; drop values=True or the scaling"
            )

    @property
    def length_dependent(self) -> bool:
        """Whether frequencies depend on a row's length: caches then hold keys that are not rotated yet."""
        return self.scaling is not None and self.scaling.length_dependent

    @property
    def amplitude(self) -> float:
        """Factor on rotated queries and keys, hence its square on their scores; 1 unless a scaling defines another."""
        return 1.0 if self.scaling is None else self.scaling.amplitude

    @property
    def grows(self) -> bool:
        return self.query_growth is not None

    def with_pairing(self, pairing: Pairing) -> "Rotary":
        """Returns the same rotation in another basis; query and key weights need `to_pairing` to match.

        Raises ConfigError if values are rotated: they and W_o are in that basis, too.
        """
        if self.values and checked_pairing(pairing) != self.pairing:
            raise ConfigError(
                "Rotary: the pairing cannot change if values=True: W_v and W_o depend on it, too, and conversion "
                f"reorders W_q and W_k only; keep pairing={self.pairing!r}"
            )
        return replace(self, pairing=pairing)

    def rotated_dims(self, head_dim: int) -> int:
        """Returns d for heads of `head_dim`. Raises ConfigError if it is odd, or does not fit."""
        dims = head_dim if self.dims is None else self.dims
        if dims % 2:
            raise ConfigError(
                f"Rotary: head_dim {head_dim} is odd, and coordinates are rotated in pairs; "
                f"use an even head_dim, or dims={max(head_dim - 1, 2)} to rotate only a prefix"
            )
        if dims > head_dim:
            raise ConfigError(f"Rotary: dims={dims} does not fit heads of {head_dim}")
        if not isinstance(self.pairing, str):
            coordinate_pairs(self.pairing, dims)
        _scheduled(self.schedule, self.theta, dims, torch.device("cpu"))
        return dims

    def frequencies(self, head_dim: int, length: int | Tensor | None = None) -> Tensor:
        """Returns the radians per position of each pair, float64: [d/2], or [..., d/2] for a `length` of shape [...].

        `length` (tokens in the row) matters only if `length_dependent`; None means rows within the trained context.
        Trained frequencies are given as at the start of training.
        """
        dims = self.rotated_dims(head_dim)
        length = torch.tensor(length) if isinstance(length, int) else length
        if self.scaling is None:
            device = None if length is None else length.device
            return _scheduled(self.schedule, self.theta, dims, device)
        return self.scaling.frequencies(self.theta, dims, length)

    def check_head_dim(self, head_dim: int) -> None:
        with torch.device("cpu"):  # values are needed, even if a model is built on the device "meta"
            self.frequencies(head_dim)

    def trained_numbers(self, head_dim: int) -> int:
        """Returns one offset per frequency if `trainable`, else 0."""
        return self.rotated_dims(head_dim) // 2 if self.trainable else 0

    def trained_frequencies(self, head_dim: int, offset: Tensor | None = None) -> Tensor:
        if self.length_dependent:
            return super().trained_frequencies(head_dim, offset)
        start = self.frequencies(head_dim)
        return start if offset is None else start.to(offset.device) + offset

    def saved_bytes(self, q: Tensor, k: Tensor, scores_stored: bool) -> int:
        """Returns the bytes of each coordinate and its partner, and of angles, cosines and sines, if frequencies are
        trained."""
        dims = self.rotated_dims(q.shape[3])
        rotated = 2 * (q[..., :dims].nbytes + k[..., :dims].nbytes)
        return self.trainable * (rotated + q.shape[2] * dims * (4 + 2 * q.itemsize))

    def rotation(
        self,
        position: Tensor,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        length: int | Tensor | None = None,
        offset: Tensor | None = None,
    ) -> RotaryTable:
        """Returns the cosines and sines of `position`; `length` as in `rotate`. Raises ConfigError unless `offset`
        [d/2] is given exactly if `trainable`."""
        if position.dim() not in (1, 2):
            raise ConfigError(f"Rotary: positions must be [T] or [B, T], got shape {tuple(position.shape)}")
        if self.length_dependent:
            if length is None:
                raise ConfigError(
                    f"Rotary: {type(self.scaling).__name__} depends on each row's length; give length, "
                    "the number of tokens of each row as [B] (or one number for all)"
                )
            frequency = self.frequencies(head_dim, torch.as_tensor(length, device=position.device))
        else:
            frequency = self.frequencies(head_dim).to(position.device)
        if (offset is None) == self.trainable or (offset is not None and offset.shape != frequency.shape):
            raise ConfigError(
                f"Rotary: offset must have shape {list(frequency.shape)} if trainable=True (nn.RotaryEmbedding passes "
                f"it) and be None otherwise; got {None if offset is None else list(offset.shape)} for {self}"
            )
        frequency = frequency if offset is None else frequency + offset
        if frequency.dim() == 2:
            frequency = frequency[:, None]
        angle = exact_positions(position)[..., None] * frequency
        out_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        cos, sin = (angle.cos() * self.amplitude).to(out_dtype), (angle.sin() * self.amplitude).to(out_dtype)
        table = RotaryTable.of(cos, sin, self.pairing, self.rotated_dims(head_dim), self.values)
        if self.query_growth is None:
            return table
        growth, span = self.query_growth
        return replace(table, query_factor=(1 + growth * (position // span).double().log1p()).to(out_dtype))

    def rotate(
        self,
        x_BHTD: Tensor,
        position_BT: Tensor,
        length: int | Tensor | None = None,
        offset: Tensor | None = None,
    ) -> Tensor:
        """Returns `x_BHTD`, queries or keys, rotated by their positions; same dtype.

        position_BT   integers, [T] or [B or 1, T]
        length        [B] or a number: tokens in each row; [B or 1, T]: in each token's document, if documents are
                      packed. Required if `length_dependent`; otherwise it has no effect
        offset        [d/2], the trained offsets of the frequencies, if `trainable`
        """
        return self.rotation(position_BT, x_BHTD.shape[-1], x_BHTD.dtype, length, offset).apply(x_BHTD)


def _checked_schedule(schedule: object) -> Schedule:
    """Returns `schedule` in hashable form. Raises ConfigError for anything else."""
    names = ("powers", *_OF_X)
    if isinstance(schedule, str):
        check_known(schedule, names, "Rotary: unknown schedule", are="give d/2 frequencies, or one of")
        return cast(Schedule, schedule)
    if not isinstance(schedule, Sequence) or not schedule or not all(map(_is_number, schedule)):
        raise ConfigError(
            f"Rotary: schedule must be one of {', '.join(names)}, or d/2 finite numbers, got {schedule!r}"
        )
    return tuple(float(f) for f in schedule)


def _scheduled(schedule: Schedule, theta: float, dims: int, device: torch.device | None = None) -> Tensor:
    """Returns the radians per position of each pair, float64 [dims/2]. Raises ConfigError for another number of
    frequencies.
    """
    if schedule == "powers":
        return powers(theta, dims, device)
    if isinstance(schedule, str):
        return _OF_X[schedule](torch.arange(0, dims, 2, dtype=torch.float64, device=device) / dims)
    if len(schedule) != dims // 2:
        raise ConfigError(
            f"Rotary: schedule lists {len(schedule)} frequencies, but {dims} rotated dims are {dims // 2} pairs"
        )
    return torch.tensor(schedule, dtype=torch.float64, device=device)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
