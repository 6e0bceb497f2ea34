"""Slots in an order in which each document is one run and its indices rise: what a running sum needs.

Legend: B rows, N slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.tokens import Tokens


@dataclass(frozen=True, eq=False)
class Order:
    """Where a row's slots go, and what stands there then. None wherever nothing need be done.

    slots       the slot that comes first, second, ...; they lie in order when None.  int64 [B|1, N]
    documents   of each slot, in that order; empty slots bear that of the slot before. One document when None.
                                                                                      int64 [B|1, N]
    valid       which slots hold a token, in the order of the row itself; all when None.  bool [B|1, N]
    """

    slots: Tensor | None = None
    documents: Tensor | None = None
    valid: Tensor | None = None

    def arrange(self, t: Tensor) -> Tensor:
        """t [B, H, N, ...] with its slots in this order."""
        return t if self.slots is None else _take(t, self.slots)

    def placed(self, t: Tensor) -> Tensor:
        """`arrange` after `zeroed`."""
        return self.arrange(self.zeroed(t))

    def restore(self, t: Tensor) -> Tensor:
        """t [B, H, N, ...], in this order, with its slots where they were."""
        return t if self.slots is None else _take(t, self.slots.argsort(1))

    def zeroed(self, t: Tensor) -> Tensor:
        """t [B, H, N, ...], in the row's own order, with exact zeros (and zero gradients) in empty slots."""
        return t if self.valid is None else t.masked_fill(~self.valid[:, None, :, None], 0.0)


def order_of(tokens: Tokens, *, alone: bool = True) -> Order:
    """The order of these tokens. Unless they are `alone`, others will ask which document theirs is."""
    if tokens.count == 0 or (tokens.start is not None and (alone or tokens.document is None)):
        return Order()
    valid = tokens.valid
    documents = torch.where(valid, tokens.documents, -1)
    several = tokens.document is not None
    if several and alone:
        several = bool(((documents.amax(1, keepdim=True) != documents) & valid).any())
    place = torch.where(valid, documents * (tokens.index.max() + 1) + tokens.index, -1)
    before = torch.nn.functional.pad(place.cummax(1).values[:, :-1], (1, 0), value=-1)
    slots = None
    if bool(((place <= before) & valid).any()):
        slots = torch.where(valid, place, torch.iinfo(torch.int64).max).argsort(1)
        documents = documents.gather(1, slots)
    return Order(
        slots,
        documents.cummax(1).values if several else None,
        None if bool(valid.all()) else valid,
    )


def _take(t: Tensor, slots: Tensor) -> Tensor:
    at = slots.view(slots.shape[0], 1, -1, *[1] * (t.dim() - 3))
    return t.gather(2, at.expand(t.shape))
