"""The layer of linear attention: the projections of `Attention` around sums over the keys.

Legend: B rows, T queries, S keys, M width of the model, H query heads, K kv heads, D per query and key, E per value.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from headway.attention import KeyValues
from headway.attention.linear_attention import (
    LinearAttentionSpec,
    check_form,
    check_pattern,
    forbid_weights,
    prepare,
)
from headway.cache import LayerCache, LinearAttentionCache
from headway.errors import ConfigError
from headway.nn.attention import Attention
from headway.nn.rotary_embedding import Table
from headway.patterns import Causal, Pattern
from headway.positions import NoPositions, PositionScheme, Rotary
from headway.scores import Score
from headway.tokens import Tokens


class LinearAttention(Attention):
    """Attention in time linear in the length: `Attention` with a `LinearAttentionSpec` in place of the softmax.

        q, k, v = x Wq, x Wk, x Wv               per head; q, k = norm(q), norm(k) where asked for
        y       = linear_attend(q, k, v, linear, pattern, rotation) Wo

    Parameters bear the names and shapes of `Attention`'s, so that its state dict fits. Positions turn features, not
    queries and keys: `linear.rotary` says where.

    Args:
        linear: the similarity.
        pattern: Causal() or Full().
        form: as in `linear_attend`.
        score, dropout: there are no weights that these could act on: an error, with the reason.
        others: as in `Attention`.

    Raises:
        PatternError: another pattern; score or dropout. ConfigError: positions that mark scores, or turn where
        `linear` turns nothing, or do not keep lengths where "cosine" relies on it. HeadwayError as in `Attention`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        linear: LinearAttentionSpec = LinearAttentionSpec(),  # noqa: B008  (a frozen value)
        head_dim: int | None = None,
        value_dim: int | None = None,
        pattern: Pattern = Causal(),  # noqa: B008
        positions: PositionScheme = NoPositions(),  # noqa: B008
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        score: Score | Sequence[Score] = (),
        dropout: float = 0.0,
        output_dropout: float = 0.0,
        form: str = "auto",
    ) -> None:
        forbid_weights(score, dropout)
        forbid_positions(linear, positions)
        check_pattern(linear, pattern)
        check_form(form, pattern)
        super().__init__(
            width,
            heads,
            kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            pattern=pattern,
            positions=positions,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm=qk_norm,
            norm_eps=norm_eps,
            output_dropout=output_dropout,
        )
        self.linear, self.form = linear, form

    def forward(
        self,
        x_BTM: Tensor,
        *,
        tokens: Tokens | None = None,
        cache: LayerCache | None = None,
        memory: Tensor | KeyValues | None = None,
        memory_tokens: Tokens | None = None,
        rotation: Table | None = None,
        score: Sequence[Score] = (),
    ) -> Tensor:
        """[B, T, M] -> [B, T, M].

        Args:
            x_BTM: what queries are made of, and keys and values unless `memory` is given.
            tokens: of x; without them rows are numbered from 0, or from where `cache` ended.
            cache: a `LinearAttentionCache`, to which the chunk is added.
            memory: [B, S, M], what keys and values are made of: cross-attention (pattern Full(), no positions, no
                cache). Or `keys(memory)`, which are the same at every step.
            memory_tokens: of memory; all of it unless given.
            rotation: `turns(...)` of these tokens, when several layers share it.
            score: there are no weights that it could act on: an error, with the reason.
        """
        forbid_weights(score, 0.0)
        if x_BTM.dim() != 3 or x_BTM.shape[-1] != self.width:
            raise ConfigError(
                f"LinearAttention: x must be [batch, tokens, {self.width}], got {list(x_BTM.shape)}"
            )
        turns = self.positions.marks == "queries and keys"
        if rotation is not None and (memory is not None or not turns):
            what = "memory is given" if memory is not None else f"positions are {self.positions}"
            raise ConfigError(f"LinearAttention: rotation is given, but {what}, and nothing is turned")
        if memory is not None:
            return self._across(x_BTM, tokens, cache, memory, memory_tokens)
        if memory_tokens is not None:
            raise ConfigError("LinearAttention: memory_tokens describe `memory`, which is not given")
        if cache is not None:
            self._check_cache(cache)
        if tokens is None:
            count, device = x_BTM.shape[1], x_BTM.device
            fresh = Tokens.range(count, device=device)
            tokens = fresh if cache is None else cache.next_tokens(count)
        q, k, v = self._project(x_BTM)
        if rotation is None:
            rotation = self.turns(tokens, q.dtype)
        if rotation is not None and rotation.turns_values:
            v = rotation.apply(v)
        call = prepare(q, k, v, self.linear, self.pattern, tokens, tokens, rotation)
        past = cache.update(call.state(), tokens) if isinstance(cache, LinearAttentionCache) else None
        return self._out(call.attend(past, self.form))

    def _check_cache(self, cache: LayerCache) -> None:
        if not isinstance(cache, LinearAttentionCache) or cache.linear != self.linear:
            given = f"of {cache.linear}" if isinstance(cache, LinearAttentionCache) else "of keys"
            raise ConfigError(
                f"LinearAttention: cache must be a LinearAttentionCache of {self.linear}, got a {type(cache).__name__} "
                f"{given}; make it: LinearAttentionCache(layer.linear, CacheSpec(...))"
            )
        if not self.pattern.is_causal:
            raise ConfigError(
                f"LinearAttention: under {self.pattern} queries see later tokens, so there is no cache; drop cache="
            )
        if self.positions.length_dependent:
            raise ConfigError(
                f"LinearAttention: under {self.positions} earlier keys turn anew as a row grows, but they have been "
                "summed and cannot; decode without a cache, or use a scaling that does not depend on the length"
            )

    def _across(
        self,
        x: Tensor,
        tokens: Tokens | None,
        cache: LayerCache | None,
        memory: Tensor | KeyValues,
        memory_tokens: Tokens | None,
    ) -> Tensor:
        if cache is not None:
            raise ConfigError(
                "LinearAttention: memory is there as a whole, so cross-attention takes no cache; drop cache="
            )
        if self.pattern.is_causal or self.positions.marks == "queries and keys":
            raise ConfigError(
                "LinearAttention: positions of x and memory are not comparable, so cross-attention needs "
                f"pattern=Full() and no rotary positions; got {self.pattern} and {self.positions}"
            )
        keys = self._memory_keys(memory, memory_tokens, x.shape[0])
        at_x = Tokens.range(x.shape[1], device=x.device) if tokens is None else tokens
        q = self._heads(self.q_proj(x), self.head_dim, self.q_norm)
        call = prepare(q, keys.k, keys.v, self.linear, self.pattern, at_x, keys.tokens, None)
        return self._out(call.attend(None, self.form))

    def _out(self, out_BHTE: Tensor) -> Tensor:
        y: Tensor = self.drop_output(self.o_proj(out_BHTE.transpose(1, 2).flatten(2)))
        return y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, linear={self.linear}"


def forbid_positions(linear: LinearAttentionSpec, positions: PositionScheme) -> None:
    """Raises ConfigError for positions that `linear` cannot take."""
    if positions.marks == "scores":
        forbid_weights(positions.scores(1, 2, True), 0.0)
    if positions.marks == "queries and keys" and linear.rotary == "none":
        raise ConfigError(
            f'LinearAttention: positions are {positions}, but LinearAttentionSpec(rotary="none") turns nothing'
        )
    if linear.is_cosine and isinstance(positions, Rotary) and positions.amplitude != 1:
        raise ConfigError(
            f'LinearAttention: "cosine" is a distribution because turning keeps lengths, but {positions} multiplies '
            f"them by {positions.amplitude:.4g}; use a scaling without an amplitude, or another feature"
        )
