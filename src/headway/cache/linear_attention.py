"""The past of linear attention: sums, so its size does not depend on how long the past is.

Legend: B rows, K kv heads, T slots of a chunk, F features, E per value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from headway.attention.linear_attention import LinearAttentionSpec, LinearState, check_pattern
from headway.cache.chunk import Lengths
from headway.cache.layer_cache import LayerCache
from headway.errors import CacheError
from headway.patterns import Causal
from headway.tokens import Tokens


@final
class LinearAttentionCache(LayerCache):
    """The sums over the past keys of one layer of linear attention: one `LinearState` for all rows.

        past = cache.update(linear_state(k, v, linear, tokens=tokens, rotation=rotation), tokens)
        out  = linear_attend(q, k, v, linear, Causal(), ..., past=past)

    Law: however a sequence is cut into chunks, this gives what one causal call over all of it gives, because states
    add. Keys are turned at their own positions before they are summed, and padding is not summed. Nothing can be
    taken out of a sum again: a state refuses to trim, and copies (`fork`) are cheap. Caches hold no gradients.

    Args:
        linear: the attention; it says how many features a key has.
        batch, kv_heads, head_dim, value_dim: B, K, D, and E (D unless given).
        dtype, device: of keys and values. The sums are float64 for float64, else float32, since they grow.

    Raises CacheError for sizes that are not positive and for torch.int8 (sums do not fit into 8 bits), PatternError
    for features that depend on later keys.
    """

    def __init__(
        self,
        linear: LinearAttentionSpec,
        *,
        batch: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
        bad = [f"{name}={n}" for name, n in sizes.items() if n < 1] + [f"batch={batch}"] * (batch < 0)
        if bad:
            raise CacheError(f"LinearAttentionCache: sizes must be positive, got {', '.join(bad)}")
        if not dtype.is_floating_point:
            raise CacheError(
                f"LinearAttentionCache: sums over all keys are kept in float32 (float64 for float64), not in {dtype}; "
                "they are small at any length, so give the dtype of the keys"
            )
        check_pattern(linear, Causal())
        self.linear = linear
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        with torch.inference_mode(False):
            self._state = LinearState.empty(
                batch, kv_heads, linear.features(head_dim), value_dim, kept, device
            )
        self._lengths: Lengths = (0,) * batch

    def update(self, new: LinearState, tokens: Tokens) -> LinearState:
        """Adds the state of a chunk and returns the one before it: the `past` of the chunk's queries.

        Args:
            new: of the chunk's keys and values, in float32 (float64).
            tokens: of the chunk, [B|1, T]. In each row the indices go on where the row ended; empty slots may
                stand anywhere.
        Raises:
            CacheError: sizes, dtype, device or indices do not fit, gradients are asked for, or the tokens are
                of several documents. The cache is then as it was.
        """
        past = self._state
        past.check_like(new)
        if torch.is_grad_enabled() and (new.kv.requires_grad or new.k.requires_grad):
            raise CacheError(
                "LinearAttentionCache.update: the state requires a gradient, and a cache holds none: decode under "
                "torch.no_grad() or torch.inference_mode(), or train without a cache"
            )
        counts = self._read(tokens).per_row(self.batch)[1]
        with torch.inference_mode(False), torch.no_grad():
            self._state = past.merge(new)
        self._lengths = tuple(length + n for length, n in zip(self._lengths, counts, strict=True))
        return past

    @property
    def state(self) -> LinearState:
        """The sums over all that has been seen."""
        return self._state

    def _may_trim(self, ends: Lengths) -> None:
        if ends != self._lengths:
            raise CacheError(
                "LinearAttentionCache.trim: linear attention keeps sums over its keys, and no key can be taken out "
                "of a sum again; fork() before the tokens that may have to go, which copies "
                f"{self.nbytes} bytes whatever the length"
            )

    def _forget(self, ends: Lengths) -> None:
        """Nothing has been forgotten."""

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        with torch.inference_mode(False):
            self._state = LinearState(*map(change, self._state.tensors))

    def _reordered(self, rows: list[int]) -> None:
        """Nothing else to keep."""

    def reserve(self, tokens: int) -> None:
        """All room is there from the start, for rows of any length."""

    @property
    def dtype(self) -> torch.dtype:
        return self._state.kv.dtype

    @property
    def device(self) -> torch.device:
        return self._state.device

    @property
    def slots(self) -> int:
        """The state counts as one slot: 1 once something has been seen."""
        return int(any(self._lengths))

    @property
    def bound(self) -> int:
        """1: the state."""
        return 1

    @property
    def nbytes(self) -> int:
        """Bytes of the sums, B K F (E + 1) numbers, and of the counts."""
        return self._state.nbytes

    def __repr__(self) -> str:
        b, k, f, e = self._state.kv.shape
        return (
            f"LinearAttentionCache(batch={b}, kv_heads={k}, features={f}, value_dim={e}, "
            f"lengths={list(self._lengths)}, {self.dtype})"
        )
