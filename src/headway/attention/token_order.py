"""The order of slots that running sums over the tokens of each document need.

Legend: B rows, H heads, N slots.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.tokens import Tokens, take_slots


@dataclass(frozen=True, eq=False)
class Order:
    """The order of a row's slots in which each document is one run with rising indices, as a running sum needs. A field
    is None if nothing needs to be done for it.

    Slots of documents 1 0 1 are put in order 1 0 2: documents 0 1 1.

    slots       the slot that comes first, second, ...; None if they are in order.        int64 [B|1, N]
    documents   the document of each slot, in that order, where an empty slot has that of the slot before it; None if
                there is one document.  int64 [B|1, N]
    valid       which slots hold a token, in the order of the row itself; None if all do.  bool [B|1, N]
    """

    slots: Tensor | None = None
    documents: Tensor | None = None
    valid: Tensor | None = None

    @cached_property
    def begins(self) -> Tensor | None:
        """Where a later document of a row begins, in this order, bool [B|1, N]; None if each row is one document."""
        if self.documents is None:
            return None
        before, after = self.documents[:, :-1], self.documents[:, 1:]
        return F.pad((before != after) & (before >= 0), (1, 0))

    def arrange(self, t: Tensor, dim: int = 2) -> Tensor:
        """Returns t [B, H, N, ...], with slots along `dim`, with its slots in this order."""
        return t if self.slots is None else take_slots(t, self.slots, dim)

    def restore(self, t: Tensor, dim: int = 2) -> Tensor:
        """Returns t [B, H, N, ...], given in this order along `dim`, with its slots in the order of the row."""
        return t if self.slots is None else take_slots(t, self.slots.argsort(1), dim)

    def zeroed(self, t: Tensor) -> Tensor:
        """Returns t [B, H, N, ...], in the order of the row, with exact zeros (and zero gradients) in empty slots."""
        return t if self.valid is None else t.masked_fill(~self.valid[:, None, :, None], 0.0)


def order_of(tokens: Tokens, *, alone: bool = True, empty_last: bool = False) -> Order:
    """Returns the order of these tokens. Unless `alone`, the documents will be compared with those of other tokens,
    and so are kept even if each row has only one. If `empty_last`, empty slots come after all tokens; otherwise they
    may stay between tokens that are in order."""
    if tokens.count == 0 or (tokens.start is not None and (alone or tokens.document is None)):
        return Order()
    valid, last = tokens.valid, torch.iinfo(torch.int64).max
    documents = torch.where(valid, tokens.documents, -1)
    several = tokens.document is not None
    if several and alone:
        several = bool(((documents.amax(1, keepdim=True) != documents) & valid).any())
    place = torch.where(
        valid, documents * (tokens.index.max() + 1) + tokens.index, last if empty_last else -1
    )
    before = F.pad(place.cummax(1).values[:, :-1], (1, 0), value=-1)
    slots = None
    if bool(((place <= before) & valid).any()):
        slots = torch.where(valid, place, last).argsort(dim=1, stable=True)
        documents = documents.gather(1, slots)
    return Order(
        slots,
        documents.cummax(1).values if several else None,
        None if bool(valid.all()) else valid,
    )
