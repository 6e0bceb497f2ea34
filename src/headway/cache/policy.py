"""Which tokens a slot table keeps, and in which slots: the interface of a policy, and the two for every pattern.

Legend: B rows, S slots, N new tokens.
"""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from headway.errors import CacheError
from headway.patterns import Retention
from headway.tokens import Tokens


class Run(NamedTuple):
    """The tokens begin, begin + 1, ... (`length` of them) in the slots slot, slot + 1, ..."""

    slot: int
    length: int
    begin: int


@dataclass(frozen=True)
class SlotPolicy(ABC):
    """Keeps, of each document with n tokens, what `retention` says and `slack` tokens more.

        index >= n - reach - 1 - slack,  index < sinks,  global tokens where `globals`

    One more than reach, so that a token can be stored before its own query is answered. A policy has no state: the
    table is the state, and it gives away the slots of tokens that are no longer kept. A subclass says where new tokens
    go, by `place`, which may be any slots that are free; and by `runs` and `slot_of`, if a formula says it for rows
    without documents and pinned tokens, which is faster.

    Attributes:
        name: of the policy, in `POLICIES`, choices and errors.
        retention: which past tokens later queries may see.
        slack: how many tokens can be trimmed at any time, and one more.

    Raises CacheError for negative numbers.
    """

    name: ClassVar[str]
    retention: Retention
    slack: int = 0

    def __post_init__(self) -> None:
        reach, sinks = self.retention.reach, self.retention.sinks
        if min(reach or 0, sinks, self.slack) < 0:
            raise CacheError(
                f"{type(self).__name__}: reach, sinks and slack count tokens, got "
                f"reach={reach}, sinks={sinks}, slack={self.slack}"
            )

    # -- what is kept ----------------------------------------------------------------------------------

    @property
    def recent(self) -> int:
        """How many of the last tokens of a document are kept; sys.maxsize where nothing may be forgotten."""
        return sys.maxsize if self.retention.reach is None else self.retention.reach + 1 + self.slack

    def floor(self, length: int) -> int:
        """The first index that is kept of `length` tokens, apart from sinks and global tokens."""
        return max(0, length - self.recent)

    def seen_from(self, length: int) -> int:
        """The first index that the next queries may see, apart from sinks and global tokens."""
        return 0 if self.retention.reach is None else max(self.retention.sinks, length - self.retention.reach)

    def most(self, tokens: int) -> int:
        """How many of `tokens` tokens of a document are kept when none is global."""
        return min(tokens, self.retention.sinks + self.recent)

    # -- in which slots --------------------------------------------------------------------------------

    has_formula: ClassVar[bool] = False

    def runs(self, begin: int, end: int) -> Sequence[Run]:
        """Where there is a formula: the slots of the tokens begin..end-1 in every row that is document 0 alone and has
        no pinned tokens but sinks. Tokens that are kept together have different slots, all below `most`, and a document
        of up to `most` tokens lies in order, from slot 0 on."""
        raise NotImplementedError

    def slot_of(self, index: Tensor) -> Tensor:
        """The formula of `runs`, for tensors of indices."""
        raise NotImplementedError

    def place(self, held: Tokens, row_N: Tensor, new: Tokens) -> Tensor:
        """Free slots for new tokens, int64 [N]; the first ones unless overridden. The table grows as needed.

        Args:
            held: of each slot, the token that it holds, [B, S]; free slots have index -1.
            row_N: the row of each new token, in ascending order.
            new: the tokens, in their order, [1, N].

        For S = 4 with slots 1 and 3 free, three new tokens of the row get 1, 3 and 4.
        """
        free_BS = ~held.valid
        free, slot = free_BS.sum(1), free_BS.nonzero()[:, 1]
        before = free.cumsum(0) - free
        rank_N = torch.arange(len(row_N), device=row_N.device) - torch.searchsorted(row_N, row_N)
        inside, beyond = before[row_N] + rank_N, held.count + rank_N - free[row_N]
        slot = torch.cat((slot, slot.new_zeros(1)))
        return torch.where(beyond < held.count, slot[inside.clamp_max(len(slot) - 1)], beyond)


@dataclass(frozen=True)
class Ring(SlotPolicy):
    """Keeps what a window sees: the last R = reach + 1 + slack tokens, the first `sinks`, and global ones.

    In rows of one document without pinned tokens behind the sinks, the slots are

        [ sinks | ring of R ]

    with token i in slot i where i < sinks, else in slot sinks + (i - sinks) mod R. So a row that has not filled the
    ring is in order, as in a growing cache, and memory is allocated only as far as rows have come. Other rows, in
    which documents share the slots or global tokens stay, put each token into the first free slot.
    """

    name = "ring"
    has_formula = True

    def runs(self, begin: int, end: int) -> Sequence[Run]:
        runs, sinks = [], self.retention.sinks
        while begin < end:
            at = begin - sinks
            slot = begin if at < 0 else sinks + at % self.recent
            length = min((0 if at < 0 else self.recent) + sinks - slot, end - begin)
            runs.append(Run(slot, length, begin))
            begin += length
        return runs

    def slot_of(self, index: Tensor) -> Tensor:
        sinks = self.retention.sinks
        return torch.where(index < sinks, index, sinks + (index - sinks) % self.recent)


@dataclass(frozen=True)
class Growing(Ring):
    """Keeps every token, for patterns whose later queries may look back any distance.

    A ring that never comes round: in rows of one document, token i is in slot i, padding takes no room, and rows are
    compact.
    """

    name = "growing"
    retention: Retention = field(default_factory=lambda: Retention(None))
