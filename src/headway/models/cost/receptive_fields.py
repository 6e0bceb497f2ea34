"""How far a stack of patterns sees."""

from __future__ import annotations

from headway.models.spec import ModelSpec


def reach(spec: ModelSpec) -> tuple[int | None, int | None]:
    """(before, after): how far to either side the last layer's output at a token depends on inputs: the layers'
    reaches added; None is no bound (global tokens have none, whether or not some are marked).

    Exact for windows, their unions and `PerHead`; of windows joined by `&`, an upper bound."""
    before, after = zip(*(pattern.reach for pattern in spec.patterns), strict=True)
    return _added(before), _added(after)


def receptive_field(spec: ModelSpec) -> int | None:
    """How many positions beside its own the last layer's output at a token spans, both sides of `reach` together.

    None is no bound. (Beltagy et al. 2020, section 3.1: l layers of window w, w / 2 on either side, see l w.)"""
    before, after = reach(spec)
    return None if before is None or after is None else before + after


def _added(reaches: tuple[int | None, ...]) -> int | None:
    known = [n for n in reaches if n is not None]
    return sum(known) if len(known) == len(reaches) else None
