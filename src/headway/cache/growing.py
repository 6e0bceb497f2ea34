"""The slot policy that keeps every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from headway.cache.policy import Run, SlotPolicy
from headway.patterns import Retention

EVERYTHING = Retention(None)


@dataclass(frozen=True)
class Growing(SlotPolicy):
    """Keeps every token, for patterns whose later queries may look back any distance.

    In rows of one document, token i is in slot i: padding takes no room, and rows are compact.
    """

    name = "growing"
    has_formula = True
    retention: Retention = EVERYTHING

    def runs(self, begin: int, end: int) -> Sequence[Run]:
        return [Run(begin, begin, end - begin)] if begin < end else []

    def slot_of(self, index: Tensor) -> Tensor:
        return index
