"""What "window = w" means in config.json; here a window counts *other* positions (`Window(before, after)`)."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from headway.errors import ConfigError
from headway.patterns import Causal, Pattern, Window
from headway.patterns.program import interval


class Convention(NamedTuple):
    """One meaning: `sides(w)` are the other positions before and after; `even` where w must be."""

    meaning: str
    sides: Callable[[int], tuple[int, int]]
    even: bool = False


CONVENTIONS: Mapping[str, Convention] = {
    "sliding_window": Convention("w keys, itself included, causal", lambda w: (w - 1, 0)),
    "attention_window": Convention(
        "w others, half of them on each side (Longformer)", lambda w: (w // 2, w // 2), even=True
    ),
}


def from_foreign(key: str, value: object) -> Pattern:
    """The pattern that the value of a key of the table means; None means no window: `Causal()`.

    Raises ConfigError for 0 (nobody agrees on it), negative, fractional or, where it must be even, odd values."""
    rule = CONVENTIONS[key]
    if value is None:
        return Causal()
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{key} must be a whole number of at least 1 ({rule.meaning}) or null for no window, got {value!r}"
        )
    if rule.even and value % 2:
        raise ConfigError(f"{key} must be even ({rule.meaning}), got {value}")
    return Window(*rule.sides(value))


def last_keys(pattern: Pattern) -> int | None:
    """w of "the last w keys" for a window; None for all else, which reading the config again will notice."""
    bounds = interval(pattern)
    return None if bounds is None or bounds[0] is None else bounds[0] + 1
