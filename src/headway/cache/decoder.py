"""The caches of all layers of a decoder, moved together.

Legend: B rows, T slots of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from headway.cache.choose import Kind, make_cache
from headway.cache.chunk import Lengths
from headway.cache.layer_cache import LayerCache
from headway.errors import CacheError
from headway.patterns import Pattern
from headway.tokens import Tokens


class DecoderCache:
    """One cache per layer, each chosen from its layer's pattern.

    `next_tokens` numbers the next chunk; the forward pass over it then updates each layer once. All layers
    have seen the same tokens between two forward passes.
    """

    def __init__(self, layers: Iterable[LayerCache]) -> None:
        self.layers = list(layers)
        if not self.layers:
            raise CacheError("DecoderCache: a decoder has one layer or more, got none")
        _ = self.lengths

    @staticmethod
    def of(
        patterns: Sequence[Pattern],
        *,
        batch: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        slack: int = 0,
        kind: Kind = "auto",
    ) -> DecoderCache:
        """One cache per pattern; arguments and errors are those of `make_cache`."""
        return DecoderCache(
            make_cache(
                pattern,
                batch=batch,
                kv_heads=kv_heads,
                head_dim=head_dim,
                value_dim=value_dim,
                dtype=dtype,
                device=device,
                slack=slack,
                kind=kind,
            )
            for pattern in patterns
        )

    def next_tokens(
        self, count: int, lengths: Sequence[int] | Tensor | None = None, side: str = "right"
    ) -> Tokens:
        """The tokens of the next chunk, numbered from where each row ended.

        Args:
            count: slots of the chunk, T.
            lengths: how many of them are tokens, per row [B]; all unless given.
            side: where the padding of shorter rows stands, "right" or "left".
        Returns:
            Tokens [B|1, T]; with `start` when all rows go on from one index without padding.
        """
        seen, device = self.lengths, self.layers[0].device
        if count < 0:
            raise CacheError(f"next_tokens: a chunk has 0 slots or more, got {count}")
        if side not in ("left", "right"):
            raise CacheError(f'next_tokens: side is "left" or "right", got {side!r}')
        given = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        counts: Lengths = (count,) * len(seen) if given is None else tuple(given)
        if len(counts) != len(seen) or any(not 0 <= n <= count for n in counts):
            raise CacheError(
                f"next_tokens: lengths must be {len(seen)} numbers in 0..{count}, one per row, "
                f"got {list(counts)}"
            )
        if len(set(seen)) == 1 and set(counts) == {count}:
            return Tokens.range(count, start=seen[0], device=device)
        size = torch.tensor(counts, dtype=torch.int64, device=device).unsqueeze(1)
        begin = torch.tensor(seen, dtype=torch.int64, device=device).unsqueeze(1)
        rank = torch.arange(count, device=device) - (count - size if side == "left" else 0)
        return Tokens(torch.where((rank >= 0) & (rank < size), begin + rank, -1))

    def trim(self, n: int | Sequence[int] | Tensor) -> None:
        """Forgets the last n tokens (of row b: n[b]) in every layer, or in none: see `Cache.trim`."""
        _ = self.lengths
        ends = [layer.after_trim(n) for layer in self.layers]
        for layer, end in zip(self.layers, ends, strict=True):
            layer.trim_to(end)

    def fork(self) -> DecoderCache:
        """An independent copy."""
        return DecoderCache(layer.fork() for layer in self.layers)

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Row i becomes what row rows[i] was, in every layer: see `Cache.reorder`."""
        for layer in self.layers:
            layer.reorder(rows)

    def reserve(self, tokens: int) -> None:
        """Makes room for rows of so many tokens at once."""
        for layer in self.layers:
            layer.reserve(tokens)

    @property
    def lengths(self) -> Lengths:
        """Tokens that each row has seen. Raises CacheError when layers disagree."""
        first = self.layers[0].lengths
        for i, layer in enumerate(self.layers):
            if layer.lengths != first:
                raise CacheError(
                    f"DecoderCache: layer 0 has seen {list(first)} tokens per row, layer {i} "
                    f"{list(layer.lengths)}: a forward pass was broken off between them; start with a new "
                    "cache, or fork() before a pass that may fail"
                )
        return first

    @property
    def length(self) -> Tensor:
        """Tokens that each row has seen.  int64 [B]"""
        return torch.tensor(self.lengths, dtype=torch.int64, device=self.layers[0].device)

    @property
    def batch(self) -> int:
        return self.layers[0].batch

    @property
    def slots(self) -> int:
        """The most slots that hold a token now, over the rows, summed over the layers."""
        return sum(layer.slots for layer in self.layers)

    @property
    def bound(self) -> int | None:
        """The most slots that a row ever holds, summed over the layers; None when a layer has no bound."""
        bounds = [layer.bound for layer in self.layers]
        return None if None in bounds else sum(b for b in bounds if b is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of allocated keys and values in all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]
