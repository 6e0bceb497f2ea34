"""Which keys each rank reads from which other, found from the pattern before anything is computed.

Legend: R ranks, B rows, K kv heads, D per key and value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headway.patterns import Extent, Pattern
from headway.patterns.base import judge_pairs
from headway.tokens import Tokens

TILE, TILES = 64, 1024
"""Slots of a tile that is read or not; of a longer tile, where a row would have more than so many."""


@dataclass(frozen=True, eq=False)
class Read:
    """The keys that a rank reads of a shard, its own or another's.

    slots    of the shard, in order: those of every tile that some query of the rank may see a key of, in some row [S]
    tokens   of these slots
    pairs    (query, key) pairs of the tiles that are not ruled out, all of which are computed, in all rows of tokens
    """

    slots: Tensor
    tokens: Tokens
    pairs: int

    @property
    def count(self) -> int:
        """The number of keys that are read, S."""
        return self.slots.shape[0]


@dataclass(frozen=True, eq=False)
class ContextPlan:
    """Hops, bytes and work of each rank for one pattern: `reads[reader][owner]`, [R][R].

    In hop h, from 1 to R - 1, rank r reads from rank r - h, and sends to r + h (modulo R). Hops in which no query of
    any rank sees a key are not made, and of the others only the tiles that are seen travel.
    """

    reads: tuple[tuple[Read, ...], ...]

    @staticmethod
    def of(pattern: Pattern, shards: Sequence[Tokens], tile: int | None = None) -> "ContextPlan":
        """The plan of rows whose tokens are `shards`, rank by rank, for a pattern that all heads share (take `PerHead`
        apart first). Tiles are judged by the pattern's own `judge`; pairs are never looked at."""
        assert len(pattern.heads) == 1, "ContextPlan.of takes one pattern; take PerHead apart first"
        if tile is None:
            tile = max(TILE, -(-sum(shard.count for shard in shards) // TILES))
        every = Extent.of(Tokens.cat([_padded(shard, tile) for shard in shards]), tile, pattern.dilation)
        tiles = [-(-shard.count // tile) for shard in shards]
        left = [shard.count - torch.arange(0, shard.count, tile) for shard in shards]
        size = torch.cat(left).clamp(max=tile).to(every.lo.device)
        reads, begin = [], 0
        for count in tiles:
            at = range(begin, begin + count)
            possible, _ = judge_pairs(pattern, every.map(partial(_columns, at=at)), every)
            pairs = (possible.sum(0) * _columns(size[None], at).T).sum(0) * size
            seen = possible.any(0).any(0)
            split = zip(shards, seen.split(tiles), pairs.split(tiles), strict=True)
            reads.append(tuple(_read(shard, some, work, tile) for shard, some, work in split))
            begin += count
        return ContextPlan(tuple(reads))

    @property
    def ranks(self) -> int:
        return len(self.reads)

    @property
    def hops(self) -> tuple[int, ...]:
        """The hops, of R - 1, in which some rank reads something."""
        return tuple(
            hop
            for hop in range(1, self.ranks)
            if any(self.reads[rank][rank - hop].count for rank in range(self.ranks))
        )

    def pairs(self, rank: int) -> int:
        """The pairs that a rank computes."""
        return sum(read.pairs for read in self.reads[rank])

    def keys_read(self, rank: int) -> int:
        """Keys of a row that a rank reads from others in a forward."""
        return sum(read.count for owner, read in enumerate(self.reads[rank]) if owner != rank)

    def keys_sent(self, rank: int) -> int:
        """Keys of a row that a rank sends to others in a forward."""
        return sum(reads[rank].count for reader, reads in enumerate(self.reads) if reader != rank)

    def bytes_sent(self, rank: int, *, rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that a rank sends for one layer and step: 2 B K D numbers for each key.

        In the forward the keys that it sends, in `dtype`; the same again in the backward, where nothing was kept, and
        the gradients of those that it read, in float32 or better.
        """
        numbers = 2 * rows * kv_heads * head_dim
        forward = numbers * self.keys_sent(rank) * dtype.itemsize
        backward = numbers * self.keys_read(rank) * torch.promote_types(dtype, torch.float32).itemsize
        return 2 * forward + backward


def _padded(tokens: Tokens, tile: int) -> Tokens:
    """The tokens with empty slots up to a whole tile."""
    short = -tokens.count % tile
    empty = torch.full((1, short), -1, device=tokens.device)
    return Tokens.cat([tokens, Tokens(empty)]) if short else tokens


def _columns(t: Tensor, at: range) -> Tensor:
    return t[:, at.start : at.stop]


def _read(shard: Tokens, seen: Tensor, pairs: Tensor, tile: int) -> Read:
    slots = seen.repeat_interleave(tile)[: shard.count].nonzero().squeeze(1)
    count = slots.shape[0]
    if count == shard.count:
        tokens = shard
    elif count and int(slots[-1] - slots[0]) == count - 1:
        tokens = shard.slice(int(slots[0]), int(slots[-1]) + 1)
    else:
        tokens = shard.gather(slots.unsqueeze(0))
    return Read(slots, tokens, int(pairs.sum()))
