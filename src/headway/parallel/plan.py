"""Which keys each rank reads from which other rank, derived from the pattern before anything is computed.

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
"""Slots of a tile, the unit that is read or skipped; tiles are longer if a row would have more than TILES of them."""


@dataclass(frozen=True, eq=False)
class Read:
    """The keys that a rank reads of a shard, its own or another rank's.

    slots    of the shard, in order: those of every tile with a key that a query of the rank may attend to, in any row
        [S] tokens   of these slots
    pairs    (query, key) pairs of the tiles that are not ruled out, all of which are computed, in all rows of tokens
    """

    slots: Tensor
    tokens: Tokens
    pairs: int

    @property
    def count(self) -> int:
        """Number of keys that are read, S."""
        return self.slots.shape[0]


@dataclass(frozen=True, eq=False)
class ContextPlan:
    """Hops, bytes and work of each rank for one pattern: `reads[reader][owner]`, [R][R].

    In hop h, from 1 to R - 1, rank r reads from rank r - h, and sends to r + h (modulo R). Hops in which no query of
    any rank attends to a key are skipped, and in the other hops only the tiles that are attended to are sent.
    """

    reads: tuple[tuple[Read, ...], ...]

    @staticmethod
    def of(pattern: Pattern, shards: Sequence[Tokens], tile: int | None = None) -> "ContextPlan":
        """Returns the plan of rows whose tokens are `shards`, in the order of ranks, for a pattern that all heads share
        (split `PerHead` first). Tiles are classified by the pattern's own `judge`, without looking at individual
        pairs."""
        assert len(pattern.heads) == 1, "ContextPlan.of takes one pattern; take PerHead apart first"
        if tile is None:
            tile = max(TILE, -(-sum(shard.count for shard in shards) // TILES))
        extents = Extent.of(Tokens.cat([_padded(shard, tile) for shard in shards]), tile, pattern.dilation)
        tiles = [-(-shard.count // tile) for shard in shards]
        remaining = [shard.count - torch.arange(0, shard.count, tile) for shard in shards]
        size = torch.cat(remaining).clamp(max=tile).to(extents.lo.device)
        reads, begin = [], 0
        for count in tiles:
            at = range(begin, begin + count)
            possible, _ = judge_pairs(pattern, extents.map(partial(_columns, at=at)), extents)
            # possible [B, tiles of this rank's queries, tiles of all keys]
            pairs = (possible.sum(0) * _columns(size[None], at).T).sum(0) * size
            attended = possible.any(0).any(0)
            split = zip(shards, attended.split(tiles), pairs.split(tiles), strict=True)
            reads.append(tuple(_read(shard, needed, tile_pairs, tile) for shard, needed, tile_pairs in split))
            begin += count
        return ContextPlan(tuple(reads))

    @property
    def ranks(self) -> int:
        return len(self.reads)

    @property
    def hops(self) -> tuple[int, ...]:
        """The hops, out of 1 .. R - 1, in which some rank reads keys."""
        return tuple(
            hop
            for hop in range(1, self.ranks)
            if any(self.reads[rank][rank - hop].count for rank in range(self.ranks))
        )

    def pairs(self, rank: int) -> int:
        """Returns the number of (query, key) pairs that a rank computes."""
        return sum(read.pairs for read in self.reads[rank])

    def keys_read(self, rank: int) -> int:
        """Returns the number of keys of a row that a rank reads from others in a forward."""
        return sum(read.count for owner, read in enumerate(self.reads[rank]) if owner != rank)

    def keys_sent(self, rank: int) -> int:
        """Returns the number of keys of a row that a rank sends to others in a forward."""
        return sum(reads[rank].count for reader, reads in enumerate(self.reads) if reader != rank)

    def bytes_sent(self, rank: int, *, rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Returns the bytes that a rank sends for one layer and training step: 2 B K D numbers for each key.

        In the forward it sends its keys, in `dtype`; in the backward the same again, since readers keep none of them,
        and the gradients of the keys that it read, in float32 or wider.
        """
        numbers = 2 * rows * kv_heads * head_dim
        forward = numbers * self.keys_sent(rank) * dtype.itemsize
        backward = numbers * self.keys_read(rank) * torch.promote_types(dtype, torch.float32).itemsize
        return 2 * forward + backward


def _padded(tokens: Tokens, tile: int) -> Tokens:
    """Returns the tokens padded with empty slots to a multiple of a tile."""
    missing = -tokens.count % tile
    empty = torch.full((1, missing), -1, device=tokens.device)
    return Tokens.cat([tokens, Tokens(empty)]) if missing else tokens


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
