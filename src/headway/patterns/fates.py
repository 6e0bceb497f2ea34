"""What becomes of keys: seen, kept for later queries, released, or yet to come."""

import torch
from torch import Tensor

from headway.patterns.base import Pattern, visible
from headway.tokens import Tokens

FATES = ("later", "released", "kept", "seen")


def fates(pattern: Pattern, q: Tokens, k: Tokens) -> Tensor:
    """What each query finds of each key, as places in `FATES`: int8 [B|1, H|1, T, S].

    "seen" keys are `visible` to it; "kept" ones may be seen by queries from here on, or by other heads; no query from
    here on sees "released" ones (`Retention`), which a cache need not have; "later" ones have yet to come. Where
    queries see later keys nothing is released, and nothing is late."""
    seen = visible(pattern, q, k)
    away, kept = q.index.unsqueeze(-1) - k.index.unsqueeze(-2), pattern.retention
    held = torch.ones_like(away, dtype=torch.bool)
    if pattern.is_causal and kept.reach is not None:
        pinned = k.index < kept.sinks
        if kept.globals and k.is_global is not None:
            pinned = pinned | k.is_global
        held = away <= kept.reach
        if kept.chunk is not None:
            begin = (q.index + 1) // kept.chunk * kept.chunk
            held = held & (k.index.unsqueeze(-2) >= begin.unsqueeze(-1))
        held = held | pinned.unsqueeze(-2)
    found = torch.where(held, FATES.index("kept"), FATES.index("released")).to(torch.int8)
    if pattern.is_causal:
        found = found.masked_fill(away < 0, FATES.index("later"))
    return torch.where(seen, FATES.index("seen"), found.unsqueeze(1)).to(torch.int8)
