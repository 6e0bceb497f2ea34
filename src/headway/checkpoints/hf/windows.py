"""What "window = w" means elsewhere, in one table; here a window counts *other* positions (`Window(before,
after)`).

Everything that reads or writes a foreign window goes through `from_foreign` and `to_foreign`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headway.errors import ConfigError, did_you_mean
from headway.patterns import Causal, Pattern, Window
from headway.patterns.program import interval


@dataclass(frozen=True)
class Convention:
    """One foreign meaning: `sides(w)` gives (before, after) in other positions, None where there is no
    bound."""

    meaning: str
    sides: Callable[[int], tuple[int, int]]
    even: bool = False
    least: int = 1


CONVENTIONS: Mapping[str, Convention] = {
    "huggingface sliding_window": Convention("w keys, itself included, causal", lambda w: (w - 1, 0)),
    "huggingface attention_window": Convention(
        "w others, half of them on each side (Longformer)", lambda w: (w // 2, w // 2), even=True
    ),
    "huggingface local_attention": Convention(
        "others at distance at most w / 2 on each side (ModernBERT)",
        lambda w: (w // 2, w // 2),
        even=True,
    ),
    "longformer attention_window": Convention(
        "others at distance at most w on each side (allenai/longformer's own files)", lambda w: (w, w)
    ),
    "gpt-neo window_size": Convention("w keys, itself included, causal", lambda w: (w - 1, 0)),
    "flash-attn left": Convention("w others before, causal: window_size = (w, 0)", lambda w: (w, 0), least=0),
    "headway before": Convention("w others before, causal", lambda w: (w, 0), least=0),
}


def from_foreign(convention: str, value: object) -> Pattern:
    """The pattern that `value` means under a convention of the table; None means no window: `Causal()`.

    Raises ConfigError for 0 (nobody agrees on it), negative, fractional or, where it must be even, odd
    values.
    """
    if convention not in CONVENTIONS:
        raise ConfigError(f"unknown window convention {convention!r}{did_you_mean(convention, CONVENTIONS)}")
    rule = CONVENTIONS[convention]
    key = convention.split()[-1]
    if value is None:
        return Causal()
    if isinstance(value, bool) or not isinstance(value, int) or value < rule.least:
        raise ConfigError(
            f"{key} must be a whole number of at least {rule.least} ({rule.meaning}) or null for no window, "
            f"got {value!r}"
        )
    if rule.even and value % 2:
        raise ConfigError(f"{key} must be even ({rule.meaning}), got {value}")
    return Window(*rule.sides(value))


def last_keys(pattern: Pattern) -> int | None:
    """w where the pattern is the last w keys, itself included; None where it is all before; else
    ConfigError.

    `sliding_window` of transformers can express no others.
    """
    bounds = interval(pattern)
    if bounds is None or bounds[1] != 0:
        raise ConfigError(
            f"{pattern} is neither Causal() nor Window.last(w): sliding_window cannot express it"
        )
    return last_keys_if_any(pattern)


def last_keys_if_any(pattern: Pattern) -> int | None:
    """w of "the last w keys" for a window; None for all else, which reading the config again will notice."""
    bounds = interval(pattern)
    return None if bounds is None or bounds[0] is None else bounds[0] + 1
