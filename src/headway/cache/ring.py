"""The slot policy of bounded size, for windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.cache.policy import Run, SlotPolicy
from headway.errors import CacheError


@dataclass(frozen=True)
class Ring(SlotPolicy):
    """Keeps what a window sees: the last R = reach + 1 + slack tokens, the first `sinks`, and global ones.

    In rows of one document without pinned tokens behind the sinks, the slots are

        [ sinks | ring of R ]

    with token i in slot i where i < sinks, else in slot sinks + (i - sinks) mod R. So a row that has not filled the
    ring is in order, as in a growing cache, and memory is allocated only as far as rows have come. Other rows, in
    which documents share the slots or global tokens stay, put each token into the first free slot.

    Raises CacheError for a retention without a reach.
    """

    name = "ring"
    has_formula = True

    def __post_init__(self) -> None:
        if self.recent is None:
            raise CacheError("Ring: the retention has no reach, so nothing may be forgotten; use Growing")
        super().__post_init__()

    def runs(self, begin: int, end: int) -> Sequence[Run]:
        assert self.recent is not None
        runs, sinks = [], self.retention.sinks
        while begin < end:
            at = begin - sinks
            slot = begin if at < 0 else sinks + at % self.recent
            count = min((0 if at < 0 else self.recent) + sinks - slot, end - begin)
            runs.append(Run(slot, begin, count))
            begin += count
        return runs

    def slot_of(self, index: Tensor) -> Tensor:
        assert self.recent is not None
        sinks = self.retention.sinks
        return torch.where(index < sinks, index, sinks + (index - sinks) % self.recent)
