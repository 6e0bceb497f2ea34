"""The past of linear attention: sums, so its size does not depend on how long the past is.

Legend: B rows, K kv heads, T slots of a chunk, F features, E per value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from headway.attention.linear_attention import LinearAttentionSpec, LinearState, check_pattern
from headway.cache.layer_cache import LayerCache
from headway.cache.sequences import Documents, SequenceLengths
from headway.cache.spec import CacheSpec
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
        spec: rows, heads and sizes. The sums are float64 for float64, else float32, since they grow.
        sequences: shared by the layers of a decoder; its own unless given.

    Attributes:
        state: the sums over all that has been seen.

    Raises CacheError for torch.int8 (sums do not fit into 8 bits), PatternError for features that depend on later
    keys.
    """

    def __init__(
        self, linear: LinearAttentionSpec, spec: CacheSpec, sequences: SequenceLengths | None = None
    ) -> None:
        check_pattern(linear, Causal())
        super().__init__(SequenceLengths(spec.batch, spec.device) if sequences is None else sequences)
        self.linear = linear
        kept = sums_dtype(spec.dtype)
        shape = (spec.batch, spec.kv_heads, linear.features(spec.head_dim), spec.value_size)
        with torch.inference_mode(False):
            self.state = LinearState.empty(*shape, kept, spec.device)

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
        past = self.state
        past.check_like(new)
        if torch.is_grad_enabled() and (new.kv.requires_grad or new.k.requires_grad):
            raise CacheError(
                "LinearAttentionCache.update: the state requires a gradient, and a cache holds none: decode under "
                "torch.no_grad() or torch.inference_mode(), or train without a cache"
            )
        if tokens.document is not None and bool(((tokens.document != 0) & tokens.valid).any()):
            raise CacheError(
                "LinearAttentionCache.update: a row has one sum, so it holds one document per row, but these tokens "
                "are of several (packed); give each document its own row: Tokens.from_lengths instead of Tokens.packed"
            )
        self._chunk(tokens)
        with torch.inference_mode(False), torch.no_grad():
            self.state = past.merge(new)
        self.seen = self.sequences.rows
        return past

    def _check_trim(self, ends: Sequence[Documents]) -> None:
        if [*ends] != [*self.seen]:
            raise CacheError(
                "LinearAttentionCache.trim: linear attention keeps sums over its keys, and no key can be taken out "
                "of a sum again; fork() before the tokens that may have to go, which copies "
                f"{self.nbytes} bytes whatever the length"
            )

    def _select_rows(self, rows: Tensor) -> None:
        with torch.inference_mode(False):
            self.state = LinearState(*(t.index_select(0, rows) for t in self.state.tensors))

    def reserve(self, tokens: int) -> None:
        """All room is there from the start, for rows of any length."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the sums."""
        return self.state.kv.dtype

    @property
    def slots(self) -> int:
        """The state counts as one slot: 1 once something has been seen."""
        return int(any(self.lengths))

    @property
    def bound(self) -> int:
        """1: the state."""
        return 1

    @property
    def nbytes(self) -> int:
        """Bytes of the sums, B K F (E + 1) numbers, and of the counts."""
        return self.state.nbytes

    def __repr__(self) -> str:
        b, k, f, e = self.state.kv.shape
        return (
            f"LinearAttentionCache(batch={b}, kv_heads={k}, features={f}, value_dim={e}, "
            f"lengths={list(self.lengths)}, {self.dtype})"
        )


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the sums over keys of this dtype: float64 for float64, else float32, since they grow. Raises CacheError for
    torch.int8."""
    if not dtype.is_floating_point:
        raise CacheError(
            f"linear attention keeps sums over all keys in float32 (float64 for float64), not in {dtype}; they are "
            "small at any length, so give the dtype of the keys"
        )
    return torch.float64 if dtype == torch.float64 else torch.float32
