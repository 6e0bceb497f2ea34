"""Attention and a layer with a state, run on the same tokens in parallel within one layer.

Legend: B rows, T tokens, N selected slots, M width.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from headway.cache.paged_cache import LayerCache
from headway.errors import ConfigError
from headway.nn.attention import Attention
from headway.nn.mixing import StateLayer
from headway.nn.scale import scaled


class AttentionBeside(Attention):
    """`Attention` in parallel with a layer that has a state of the past: a attention(x) + b beside(x), with factors
    (a, b).

    Its cache holds keys and values, and the state in `LayerCache.beside`. (Falcon-H1, 2025, section 2.1.)

    Args:
        beside: the other layer, of the same width.
        factors: the factors a and b on the two outputs.
        others: as in `Attention`.
    """

    def __init__(
        self, *sizes: Any, beside: StateLayer, factors: Sequence[float] = (1.0, 1.0), **options: Any
    ) -> None:
        super().__init__(*sizes, **options)
        self.beside, self.factors = beside, factors

    def forward(self, x_BTM: Tensor, *, cache: LayerCache | None = None, **options: Any) -> Tensor:
        """Computes the layer: [B, T, M] -> [B, T, M], or [B, N, M] for N selected slots; arguments as in
        `AttentionLayer.forward`. Raises ConfigError for what the other layer does not support (memory, and tokens of
        other ranks), and for a cache without its states."""
        if options.get("memory") is not None:
            raise ConfigError("AttentionBeside: cross-attention is not supported; drop memory=")
        state = None if cache is None else cache.beside
        if cache is not None and state is None:
            raise ConfigError(
                "AttentionBeside: cache has no state for the mixer beside attention; use make_cache of the model"
            )
        shared_options = {name: options.get(name) for name in ("tokens", "selected", "context")}
        other = scaled(self.beside(x_BTM, cache=state, **shared_options), self.factors[1])
        attended = super().forward(x_BTM, cache=cache, **options)
        return scaled(attended, self.factors[0]) + other
