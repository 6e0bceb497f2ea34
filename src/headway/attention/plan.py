"""Slots sorted so that the tokens of a block are alike, and plans: which key blocks each query tile computes, found
without looking at pairs. Every backend that skips blocks starts here.

Legend: B rows, N slots, D per head.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headway.patterns import Extent, Pattern, judge
from headway.patterns.base import judge_pairs
from headway.tokens import Tokens, take_slots

_BLOCK = 16
AT_ONCE = 2**15
"""Most pairs of tiles that are all judged at once, which is then faster than judging blocks of them first
(docs/log.md)."""


class BlockOrder:
    """The slots of one side in block order, with the mappings there and back: global tokens first, then tokens by
    residue class of the dilation, padding last."""

    def __init__(self, tokens: Tokens, step: int) -> None:
        """Sorts the slots; `step` is the dilation, whose residue classes are each made contiguous."""
        self.order = _order(tokens, step)
        self.tokens = tokens if self.order is None else tokens.gather(self.order)

    @property
    def slots(self) -> Tensor:
        """The original slot of each place, [B|1, N]."""
        if self.order is not None:
            return self.order
        return torch.arange(self.tokens.count, device=self.tokens.device).unsqueeze(0)

    def take(self, t: Tensor) -> Tensor:
        """Returns t [B, heads, N, D] in block order."""
        return t if self.order is None else take_slots(t, self.order)

    def give_back(self, t: Tensor) -> Tensor:
        """Returns t [B, heads, N, D], given in block order, in the original order of slots."""
        return t if self.order is None else take_slots(t, self.order.argsort(1))


def _order(tokens: Tokens, step: int) -> Tensor | None:
    """Returns the slots sorted by (empty, not global, residue, document, index), [B|1, N]; None if they are sorted
    already."""
    if tokens.static_key is not None and step == 1:
        return None
    index, document = tokens.index, tokens.documents
    if not index.numel():
        return None
    # one integer for lexicographic order, most significant field first: key * size + field, 0 <= field < size
    key = (~tokens.valid).long() * 2 + (~tokens.globals).long()
    key = key * step + index % step
    key = key * (int(document.max()) + 2) + document + 1
    key = key * (int(index.max()) + 2) + index + 1
    if bool((key[:, 1:] >= key[:, :-1]).all()):
        return None
    return key.argsort(dim=1, stable=True)


class Entry(NamedTuple):
    """Key slots begin..end-1 for a query tile; `full` if every pair is visible, otherwise the mask is evaluated."""

    begin: int
    end: int
    full: bool


@dataclass(frozen=True)
class Plan:
    """Entries for each query tile of `tile` slots: disjoint, and together they cover every visible pair.

    One plan serves all rows of the batch: an interval is included if any row needs it, and full if it is in every row.
    A plan of rows `apart` instead has query tiles for each row, one row after the other. Query tile t has the runs
    first[t] .. first[t + 1] - 1 of `begin`, `end` and `full`, in order.
    """

    tile: int
    first: list[int]
    begin: list[int]
    end: list[int]
    full: list[int]

    def row(self, tile: int) -> list[Entry]:
        """Returns the entries of one query tile."""
        runs = range(self.first[tile], self.first[tile + 1])
        return [Entry(self.begin[r], self.end[r], bool(self.full[r])) for r in runs]


def plan(
    pattern: Pattern, q: Tokens, k: Tokens, tile: int = 128, k_tile: int = 64, *, apart: bool = False
) -> Plan:
    """Returns the plan of one call for a pattern that all its heads share (`PerHead` must be split first); `apart`
    returns the plans of the rows one after another, as if each were planned alone.

    If there are many tiles, blocks of 16 x 16 tiles are judged first and only the undecided ones are looked at closely,
    so that the work grows with the number of blocks on the edge of the pattern, not with T x S. Each tile is described
    once; pairs of tiles are formed by broadcasting.
    """
    assert len(pattern.heads) == 1, "plan takes one pattern; take PerHead apart first"
    rows, tiles = max(q.rows, k.rows), -(-q.count // tile)
    apart = apart and rows != 1
    at_q, at_k = Extent.of(q, tile, pattern.dilation), Extent.of(k, k_tile, pattern.dilation)
    judged = _all_runs if rows * tiles * -(-k.count // k_tile) <= AT_ONCE else _edge_runs
    runs = judged(pattern, at_q, at_k, rows, apart)
    return _joined(runs, tile, tiles * (rows if apart else 1), k_tile, k.count)


def _all_runs(pattern: Pattern, at_q: Extent, at_k: Extent, rows: int, apart: bool) -> Tensor:
    """Returns runs (query tile, first key tile, end, full) [4, R], from every pair of tiles."""
    row, i, begin, end, full = _runs(*_judged(pattern, at_q, at_k, rows, apart))
    return torch.stack((row * at_q.lo.shape[1] + i, begin, end, full))


def _edge_runs(pattern: Pattern, at_q: Extent, at_k: Extent, rows: int, apart: bool) -> Tensor:
    """Returns the same runs, unordered, from whole blocks of tiles and from the pairs of tiles of the undecided
    blocks."""
    tiles = at_q.lo.shape[1]
    fine_q, fine_k = at_q.grouped(_BLOCK), at_k.grouped(_BLOCK)
    some, every = _judged(pattern, fine_q.joined(), fine_k.joined(), rows, apart)
    blocks = some.shape[1]
    row, i, begin, end, full = _runs(every, every)
    block = row * blocks + i
    wide = torch.stack((block * _BLOCK, begin * _BLOCK, end * _BLOCK, full)).unsqueeze(2).repeat(1, 1, _BLOCK)
    wide[0] += torch.arange(_BLOCK, device=wide.device)

    row, block_q, block_k = (some & ~every).nonzero().unbind(1)

    def chosen(t: Tensor, at: Tensor) -> Tensor:
        return t.expand(rows, -1, -1)[row, at].unsqueeze(0) if apart else t[:, at]

    possible, certain = judge(
        pattern,
        fine_q.map(lambda t: chosen(t, block_q).unsqueeze(3)),
        fine_k.map(lambda t: chosen(t, block_k).unsqueeze(2)),
    )
    _, block, line, begin, end, full = _runs(*_together(possible, certain))
    first = block_k[block] * _BLOCK
    narrow = torch.stack(((row * blocks + block_q)[block] * _BLOCK + line, first + begin, first + end, full))
    runs = torch.cat((wide.flatten(1), narrow), 1)
    # `Extent.grouped` fills the last block by repeating the last tile of a row: these query tiles are dropped.
    padded = max(1, blocks * _BLOCK)
    row, i = runs[0] // padded, runs[0] % padded
    return torch.stack((row * tiles + i, *runs[1:]))[:, i < tiles]


def _judged(pattern: Pattern, at_q: Extent, at_k: Extent, rows: int, apart: bool) -> tuple[Tensor, Tensor]:
    """Returns, for every pair of tiles, whether some pair of tokens may be visible and whether all are, each
    [rows|1, query tiles, key tiles]."""
    possible, certain = judge_pairs(pattern, at_q, at_k)
    if not apart:
        return _together(possible, certain)
    some = possible.expand(rows, -1, -1)
    return some, certain & some


def _together(possible: Tensor, certain: Tensor) -> tuple[Tensor, Tensor]:
    """Combines judgements of each row, [B, ...], into one for all rows, [1, ...]: possible in some row, certain in
    every row."""
    some = possible.any(0, keepdim=True)
    return some, certain.all(0, keepdim=True) & some


def _runs(some: Tensor, every: Tensor) -> tuple[Tensor, ...]:
    """Returns the maximal runs of equal judgement along the last axis: (place on the other axes, begin, end, full), [R]
    each.

    With some 0 1 1 1 and every 0 0 1 1: (begin 1, end 2, full 0) and (begin 2, end 4, full 1)."""
    # 0: nothing visible, 1: some, 2: all; a run begins where this changes to 1 or 2, and ends where it changes next
    kind = torch.nn.functional.pad(some.byte() + every.byte(), (1, 1))
    change = kind[..., 1:] != kind[..., :-1]
    where = (change[..., :-1] & some).nonzero().unbind(1)
    end = (change[..., 1:] & some).nonzero()[:, -1] + 1
    return *where, end, every[where].long()


def _joined(runs: Tensor, tile: int, tiles: int, width: int, count: int) -> Plan:
    """Returns the plan of runs (query tile, first key tile, end, full) [4, R]; adjacent runs that are both full or
    both partial are joined."""
    i, begin, end, full = runs[:, torch.argsort(runs[0] * (-(-count // width) + 1) + runs[1])]
    new = torch.ones_like(i, dtype=torch.bool)
    new[1:] = (i[1:] != i[:-1]) | (begin[1:] != end[:-1]) | (full[1:] != full[:-1])
    last = torch.ones_like(new)
    last[:-1] = new[1:]
    first = torch.bincount(i[new], minlength=tiles).cumsum(0).tolist()
    ends = (end[last] * width).clamp(max=count)
    return Plan(tile, [0, *first], (begin[new] * width).tolist(), ends.tolist(), full[new].tolist())
