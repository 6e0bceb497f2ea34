"""Slots in an order in which blocks of them are alike: what every backend that skips blocks begins with.

Global tokens together, residue classes of a dilation together, padding last. Legend: B rows, N slots, D per head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.tokens import Tokens


class BlockOrder:
    """One side in block order: its tokens, its original slots, and how to get there and back."""

    def __init__(self, tokens: Tokens, step: int) -> None:
        """`step`: the dilation whose residue classes are to lie together."""
        self.order = _order(tokens, step)
        self.tokens = tokens if self.order is None else tokens.gather(self.order)

    @property
    def slots(self) -> Tensor:
        """The original slot of each place, [B|1, N]."""
        if self.order is not None:
            return self.order
        return torch.arange(self.tokens.count, device=self.tokens.device).unsqueeze(0)

    def take(self, t: Tensor) -> Tensor:
        """[B, heads, N, D] in block order."""
        return t if self.order is None else t.gather(2, self._index(self.order, t))

    def give_back(self, t: Tensor) -> Tensor:
        """[B, heads, N, D] in the original order of slots."""
        return t if self.order is None else t.gather(2, self._index(self.order.argsort(1), t))

    @staticmethod
    def _index(order: Tensor, t: Tensor) -> Tensor:
        return order.view(order.shape[0], 1, -1, 1).expand(t.shape[0], t.shape[1], -1, t.shape[3])


def _order(tokens: Tokens, step: int) -> Tensor | None:
    """Slots sorted by (empty, not global, residue, document, index), [B|1, N]; None if they are already."""
    if tokens.static_key is not None and step == 1:
        return None
    index, document = tokens.index, tokens.documents
    if not index.numel():
        return None
    key = (~tokens.valid).long() * 2 + (~tokens.globals).long()
    key = key * step + index % step
    key = key * (int(document.max()) + 2) + document + 1
    key = key * (int(index.max()) + 2) + index + 1
    if bool((key[:, 1:] >= key[:, :-1]).all()):
        return None
    return key.argsort(dim=1, stable=True)
