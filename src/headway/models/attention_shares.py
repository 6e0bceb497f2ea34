"""Where a head looks, in numbers: shares of its weight, and what it is called by them.

Legend: N queries, S keys.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 0.5
"""A head is called by the first share that is at least so large."""
EVEN = 0.8
"""Entropy, as a share of that of equal weights, from which on a head is called even."""


class Shares(NamedTuple):
    """Means over some queries of the weight on the first token, the token itself, the one before it, those that follow
    earlier tokens of the same text (induction), and the earlier tokens of the same text; and of the entropy, in nats,
    as it is and as a share of that of equal weights over the same keys (1 where there is one key).

    Of weights below 0, which linear attention has, the entropy is not a number."""

    first: float
    itself: float
    previous: float
    induction: float
    same: float
    entropy: float
    evenness: float

    @property
    def kind(self) -> str:
        """The name of the largest of the first five where that is half of the weight, else "even" or "mixed"."""
        name = max(self._fields[:5], key=lambda field: float(getattr(self, field)))
        if getattr(self, name) >= MOST:
            return name
        return "even" if self.evenness >= EVEN else "mixed"


def shares_of(weights: Tensor, queries: Sequence[int], keys: Sequence[str]) -> Shares:
    """Of the weights [N, S] of queries, by their slots, over keys whose texts are given."""
    numbers: dict[str, int] = {}
    texts = torch.tensor([numbers.setdefault(text, len(numbers)) for text in keys])
    at, slots = torch.tensor(queries).unsqueeze(1), torch.arange(len(keys))
    wide = weights.double().cpu()
    earlier = texts == texts[at]
    earlier &= slots < at
    after = earlier.roll(1, 1)
    after[:, 0] = False
    masks = slots == 0, slots == at, slots == at - 1, after, earlier
    entropy = -torch.xlogy(wide, wide).sum(1)
    most = (wide != 0).sum(1).clamp_min(2).double().log()
    single = (wide != 0).sum(1) < 2
    evenness = torch.where(single, 1.0, entropy / most)
    shares = [float((wide * mask).sum(1).mean()) for mask in masks]
    return Shares._make([*shares, float(entropy.mean()), float(evenness.mean())])
