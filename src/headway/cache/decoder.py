"""The caches of all layers of a decoder, moved together.

Legend: B rows, T slots of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from headway.attention.linear_attention import LinearAttentionSpec
from headway.cache.choose import slot_policy
from headway.cache.kv_cache import KVCache
from headway.cache.layer_cache import Cache, LayerCache
from headway.cache.linear_attention import LinearAttentionCache
from headway.cache.policy import SlotPolicy
from headway.cache.sequences import SequenceLengths
from headway.cache.spec import CacheSpec
from headway.cache.table import SlotTable
from headway.errors import CacheError
from headway.patterns import Pattern


@final
class DecoderCache(Cache):
    """One cache per layer, each chosen from its layer's pattern.

    `next_tokens` numbers the next chunk; the forward pass over it then updates each layer once, all with the same
    tokens. Which slot holds which token is decided and kept once for all layers of equal slot policy.

    Raises CacheError for no layers, and for layers that have seen different tokens.
    """

    def __init__(self, layers: Iterable[LayerCache]) -> None:
        self._layers = tuple(layers)
        if not self._layers:
            raise CacheError("DecoderCache: a decoder has one layer or more, got none")
        _ = self._rows

    @staticmethod
    def of(
        patterns: Sequence[Pattern], spec: CacheSpec, *, slack: int = 0, kind: str = "auto"
    ) -> DecoderCache:
        """A cache for each layer's pattern; arguments and errors are those of `make_cache`."""
        sequences = SequenceLengths(spec.batch, spec.device)
        policies = [slot_policy(pattern, slack, kind) for pattern in patterns]
        tables: dict[SlotPolicy, SlotTable] = {p: SlotTable(p, sequences) for p in policies}
        return DecoderCache(KVCache(spec, tables[policy]) for policy in policies)

    @staticmethod
    def linear(linear: LinearAttentionSpec, layers: int, spec: CacheSpec) -> DecoderCache:
        """The sums of `layers` layers of linear attention. Raises CacheError as `LinearAttentionCache` does."""
        sequences = SequenceLengths(spec.batch, spec.device)
        return DecoderCache(LinearAttentionCache(linear, spec, sequences) for _ in range(layers))

    @property
    def layers(self) -> Sequence[LayerCache]:
        """The layers, from the first to the last."""
        return self._layers

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer: int) -> LayerCache:
        return self._layers[layer]
