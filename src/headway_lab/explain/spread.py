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
    """A ratio of two values, and its confidence interval."""

    mean: float
    least: float
    most: float


@dataclass(frozen=True)
class Gap:
    """How far the values of one contender lie above those of another, paired by seed or by round. Its properties are
    None if the bound does not allow a decision.

    mean    mean of the paired differences
    bound   t s / sqrt(n): s their standard deviation, t the 95 % point for n - 1 degrees of freedom
    """

    mean: float
    bound: float

    @property
    def seen(self) -> bool:
        """Whether the mean differs from 0 by more than the bound, which happens one time in twenty if nothing
        differs."""
        return abs(self.mean) > self.bound

    @property
    def word(self) -> str:
        """ "seen", or "too small to tell"."""
        return "seen" if self.seen else TOO_SMALL

    @property
    def higher(self) -> bool | None:
        return self.mean > 0 if self.seen else None

    @property
    def lower(self) -> bool | None:
        return self.mean < 0 if self.seen else None

    def within(self, margin: float) -> bool | None:
        """Returns whether mean ± bound lies within `margin` of 0, which shows that the values differ by less."""
        if abs(self.mean) + self.bound < margin:
            return True
        return None if abs(self.mean) - self.bound < margin else False

    def below(self, margin: float) -> bool | None:
        """Returns whether mean + bound lies below `margin`, which shows that the values are higher by less."""
        if self.mean + self.bound < margin:
            return True
        return None if self.mean - self.bound < margin else False

    @property
    def factor(self) -> Factor:
        """A gap of logarithms, as a factor."""
        return Factor(*(math.exp(self.mean + sign * self.bound) for sign in (0, -1, 1)))


def every(shown: Iterable[bool | None]) -> bool | None:
    """Returns whether all are shown: False if one is refuted, else None if one is undecided."""
    known = [*shown]
    return False if False in known else None if None in known else True


def gap(values: Sequence[float], base: Sequence[float]) -> Gap:
    """Returns the gap of `values` to `base`, pair by pair."""
    assert len(values) == len(base) >= 2, "a spread needs two pairs or more"
    differences = [a - b for a, b in zip(values, base, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return Gap(statistics.fmean(differences), T_95[min(len(differences) - 2, len(T_95) - 1)] * error)


def log_gap(values: Sequence[float], base: Sequence[float]) -> Gap:
    """Returns the gap of logarithms: the factor between times or sizes (`Gap.factor`)."""
    return gap([math.log(x) for x in values], [math.log(x) for x in base])
