"""What follows from a pattern alone: how many pairs it allows, and its picture."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.errors import PatternError
from headway.patterns.base import Pattern, classify, visible
from headway.tokens import Tokens


def pairs(pattern: Pattern, n: int, *, heads: int = 1, tokens: Tokens | None = None, tile: int = 64) -> int:
    """Allowed (query, key) pairs of an n x n call of `heads` query heads (`PerHead`: of its own): exact.

    Blocks that the pattern rules in or out as a whole are counted as areas; the predicate is evaluated on the
    others only, so nothing of size n x n is built. `tokens` says which are global (none by default).
    """
    tokens = Tokens.range(n) if tokens is None else tokens
    if tokens.count != n:
        raise PatternError(f"pairs: tokens describe {tokens.count} slots, but n is {n}")
    short = -n % tile
    if short:
        tokens = Tokens.cat([tokens, Tokens(torch.full((1, short), -1))])
    total = 0
    for head in pattern.heads:
        possible, certain = classify(head, tokens, tokens, tile, tile)
        total += int(certain.sum()) * tile * tile
        unsure = (possible & ~certain).nonzero()
        for some in unsure.split(1024) if len(unsure) else ():
            row, i, j = some.unbind(1)
            q, k = (_blocks(tokens, row, at, tile) for at in (i, j))
            total += int(visible(head, q, k).sum())
    return total if len(pattern.heads) > 1 else total * heads


def _blocks(tokens: Tokens, row: Tensor, at: Tensor, tile: int) -> Tokens:
    """Block `at[p]` of row `row[p]`, as row p of a batch."""
    slots = at.unsqueeze(1) * tile + torch.arange(tile)
    return tokens.expand(tokens.rows).select_rows(row).gather(slots)


def draw(pattern: Pattern, n: int, tokens: Tokens | None = None) -> str:
    """The pattern as text, a row per query: `#` where the key is seen; PerHead: head by head."""
    tokens = Tokens.range(n) if tokens is None else tokens
    blocks = []
    for number, head in enumerate(pattern.heads):
        title = [f"head {number}: {head}"] if len(pattern.heads) > 1 else []
        rows = visible(head, tokens, tokens)[0, 0].tolist()
        blocks.append("\n".join(title + [" ".join("#" if seen else "." for seen in row) for row in rows]))
    return "\n\n".join(blocks)
