"""Gaps between repeated runs: the mean of paired differences, and how far chance alone would move it."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway_lab.explain.report import TOO_SMALL

# Two-sided 95 % points of Student's t with 1, 2, .. degrees of freedom.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Factor(NamedTuple):
    """By how much one is larger than another, and the interval of that."""

    mean: float
    least: float
    most: float


@dataclass(frozen=True)
class Gap:
    """How far values of one contender lie above those of another with the same seeds, or in the same rounds. Its
    properties are None where the bound does not tell.

    mean    of the differences one by one
    bound   t s / sqrt(n): s their standard deviation, t the 95 % point for n - 1 degrees of freedom
    """

    mean: float
    bound: float

    @property
    def seen(self) -> bool:
        """Whether the mean differs from 0 by more than the bound: one time in twenty where nothing differs."""
        return abs(self.mean) > self.bound

    @property
    def word(self) -> str:
        """Seen, or that the bound does not tell."""
        return "seen" if self.seen else TOO_SMALL

    @property
    def higher(self) -> bool | None:
        return self.mean > 0 if self.seen else None

    @property
    def lower(self) -> bool | None:
        return self.mean < 0 if self.seen else None

    def within(self, margin: float) -> bool | None:
        """Whether mean and bound both lie within the margin of 0: shown to differ by less."""
        if abs(self.mean) + self.bound < margin:
            return True
        return None if abs(self.mean) - self.bound < margin else False

    def below(self, margin: float) -> bool | None:
        """Whether mean and bound lie below the margin: shown to be no higher by more."""
        if self.mean + self.bound < margin:
            return True
        return None if self.mean - self.bound < margin else False

    @property
    def factor(self) -> Factor:
        """A gap of logarithms, as a factor."""
        return Factor(*(math.exp(self.mean + sign * self.bound) for sign in (0, -1, 1)))


def every(shown: Iterable[bool | None]) -> bool | None:
    """Whether all are shown: no where one is not, None where one does not tell."""
    known = [*shown]
    return False if False in known else None if None in known else True


def gap(values: Sequence[float], base: Sequence[float]) -> Gap:
    """`values` against `base`, pair by pair."""
    assert len(values) == len(base) >= 2, "a spread needs two pairs or more"
    apart = [a - b for a, b in zip(values, base, strict=True)]
    error = statistics.stdev(apart) / math.sqrt(len(apart))
    return Gap(statistics.fmean(apart), T_95[min(len(apart) - 2, len(T_95) - 1)] * error)


def log_gap(values: Sequence[float], base: Sequence[float]) -> Gap:
    """The gap of logarithms: by which factor times, or sizes, differ (`Gap.factor`)."""
    return gap([math.log(x) for x in values], [math.log(x) for x in base])
