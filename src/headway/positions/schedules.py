"""The frequency that each pair of coordinates is rotated with, before any scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from headway.errors import ConfigError, did_you_mean
from headway.positions.schemes import powers

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


def checked_schedule(schedule: object) -> Schedule:
    """`schedule` in hashable form. Raises ConfigError when it is no schedule."""
    names = ("powers", *_OF_X)
    if isinstance(schedule, str):
        for name in names:
            if schedule == name:
                return name  # type: ignore[return-value]
        raise ConfigError(
            f"Rotary: schedule must be one of {', '.join(names)}, or the frequencies themselves, "
            f'got "{schedule}"{did_you_mean(schedule, names)}'
        )
    if not isinstance(schedule, Sequence) or not schedule or not all(map(_is_number, schedule)):
        raise ConfigError(
            f"Rotary: schedule must be one of {', '.join(names)}, or d/2 finite numbers, got {schedule!r}"
        )
    return tuple(float(f) for f in schedule)


def scheduled(schedule: Schedule, theta: float, dims: int, device: torch.device | None = None) -> Tensor:
    """Radians per position of each pair, float64 [dims/2]. Raises ConfigError for another number of
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
