"""Softmax attention over a declared pattern.

Legend: B rows, T tokens, M width, H query heads, K kv heads, D per query and key, E per value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from headway.attention import KeyValues, attend_keys
from headway.cache import KVCache
from headway.errors import ConfigError
from headway.nn.mixers.base import Call, Mixer, Projections
from headway.patterns import Pattern


@dataclass(frozen=True)
class SoftmaxMixer(Mixer):
    """softmax(score(scale * q k^T)) v over the pattern: `attend`. Rotates queries and keys, and values where the scheme
    says so; its cache keeps keys and values."""

    pattern: Pattern
    scale: float | None = None
    backend: str = "auto"

    def attend(self, layer: Projections, x_BTM: Tensor, call: Call) -> Tensor:
        q_BHTD, tokens, cache, rotation = layer.queries(x_BTM), call.tokens, call.cache, call.rotation
        if call.memory is not None:
            return self.softmax(layer, q_BHTD, call.memory, call)
        if cache is not None and not isinstance(cache, KVCache):
            raise ConfigError(
                f"Attention: cache must keep keys and values, and a {type(cache).__name__} keeps none; make one with "
                "headway.cache.make_cache"
            )
        k_BKTD, v_BKTE = layer.keys_values(x_BTM)
        # Where frequencies move with the row's length, caches keep keys as they are: they are rotated when read.
        rotate_late = cache is not None and rotation is not None and layer.rotary.positions.length_dependent
        if rotation is not None:
            q_BHTD = rotation.apply(q_BHTD)
            k_BKTD = k_BKTD if rotate_late else rotation.apply(k_BKTD)
            v_BKTE = rotation.apply(v_BKTE) if rotation.rotates_values else v_BKTE
        keys = KeyValues(k_BKTD, v_BKTE, tokens) if cache is None else cache.update(k_BKTD, v_BKTE, tokens)
        if rotate_late:
            keys = keys.dequantized(q_BHTD.dtype)
            late = layer.rotary(keys.tokens, q_BHTD.dtype)
            keys = replace(keys, k=late.apply(keys.k))
        return self.softmax(layer, q_BHTD, keys, call)

    def softmax(self, layer: Projections, q: Tensor, keys: KeyValues, call: Call) -> Tensor:
        """`attend` with the scores and the dropout of a layer."""
        own = layer.score() if layer.score.steps else ()
        return attend_keys(
            q,
            call.tokens,
            [keys],
            self.pattern,
            score=(*call.score, *own),
            scale=self.scale,
            dropout=layer.dropout if layer.training else 0.0,
            backend=self.backend,
            lse=False,
        ).out
