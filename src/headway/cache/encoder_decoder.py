"""What an encoder-decoder keeps while it writes: its own past, and the encoder's keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.attention import KeyValues
from headway.cache.decoder import DecoderCache
from headway.errors import CacheError


@dataclass
class EncoderDecoderCache:
    """`own` grows token by token; `memory` holds each layer's keys and values of the encoder's states, computed
    once (Vaswani et al. 2017, section 3.2.3: they come from the last layer of the encoder)."""

    own: DecoderCache
    memory: Sequence[KeyValues]

    def __post_init__(self) -> None:
        rows = {keys.k.shape[0] for keys in self.memory}
        if len(self.memory) != len(self.own) or rows != {self.own.batch}:
            raise CacheError(
                f"EncoderDecoderCache: {len(self.own)} layers of {self.own.batch} rows need as many sets of keys, got "
                f"{len(self.memory)} for {sorted(rows)} rows"
            )

    def fork(self) -> EncoderDecoderCache:
        """An independent copy; the encoder's keys, which do not change, are shared."""
        return EncoderDecoderCache(self.own.fork(), list(self.memory))
