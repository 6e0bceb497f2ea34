"""A set of keys with their values and what is known of their slots."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headway.tokens import Tokens


@dataclass(frozen=True, eq=False)
class Keys:
    """k [B, K, S, D], v [B, K, S, Dv] and the S slots' `tokens`.

    Training tensors, cache contents, pages, encoder memory: all of them are Keys; attention over several
    disjoint Keys is merged.
    """

    k: Tensor
    v: Tensor
    tokens: Tokens
