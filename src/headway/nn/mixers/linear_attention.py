"""Linear attention: sums over the keys in place of a softmax.

Legend: B rows, T tokens, M width, H query heads, K kv heads, D per query and key, E per value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from headway.attention.linear_attention import (
    LinearAttentionSpec,
    check_form,
    check_pattern,
    forbid_weights,
    prepare,
)
from headway.cache import LayerCache, LinearAttentionCache
from headway.errors import ConfigError
from headway.nn.mixers.base import Call, Mixer, Projections
from headway.patterns import Pattern
from headway.positions import PositionScheme
from headway.scores import Score


@dataclass(frozen=True)
class LinearMixer(Mixer):
    """The sums of linear attention in place of a softmax: `linear_attend`. Positions rotate features, not queries and
    keys: `linear.rotary` says where. Its cache keeps the sums.

    Raises PatternError for a pattern other than Causal() and Full(), ConfigError for a form that cannot be under it.
    """

    pattern: Pattern
    linear: LinearAttentionSpec = LinearAttentionSpec()  # noqa: RUF009  (a frozen value)
    form: str = "auto"

    def __post_init__(self) -> None:
        check_pattern(self.linear, self.pattern)
        check_form(self.form, self.pattern)

    def check(self, positions: PositionScheme, score: Sequence[Score], dropout: float) -> None:
        """There are no weights that scores or dropout could act on, and not all rotations fit all features."""
        forbid_weights(score, dropout)
        forbid_weights(positions.scores(1, 2, True), 0.0)
        if positions.marks != "queries and keys":
            return
        if self.linear.rotary == "none":
            raise ConfigError(
                f'LinearAttention: positions are {positions}, but LinearAttentionSpec(rotary="none") rotates nothing'
            )
        if self.linear.is_cosine and positions.amplitude != 1:
            raise ConfigError(
                'LinearAttention: "cosine" is a distribution because rotations keep lengths, but '
                f"{positions} multiplies them by {positions.amplitude:.4g}; use a scaling without an amplitude, or "
                "another feature"
            )

    def attend(self, layer: Projections, x_BTM: Tensor, call: Call) -> Tensor:
        tokens, cache, memory, rotation, score = call
        forbid_weights(score, 0.0)
        if cache is not None:
            self._check_cache(cache, layer.rotary.positions)
        q_BHTD = layer.queries(x_BTM)
        if memory is not None:
            across = prepare(
                q_BHTD, memory.k, memory.v, self.linear, self.pattern, tokens, memory.tokens, None
            )
            return across.attend(None, self.form)
        k_BKTD, v_BKTE = layer.keys_values(x_BTM)
        if rotation is not None and rotation.rotates_values:
            v_BKTE = rotation.apply(v_BKTE)
        own = prepare(q_BHTD, k_BKTD, v_BKTE, self.linear, self.pattern, tokens, tokens, rotation)
        past = cache.update(own.state(), tokens) if isinstance(cache, LinearAttentionCache) else None
        return own.attend(past, self.form)

    def _check_cache(self, cache: LayerCache, positions: PositionScheme) -> None:
        if not isinstance(cache, LinearAttentionCache) or cache.linear != self.linear:
            given = f"of {cache.linear}" if isinstance(cache, LinearAttentionCache) else "of keys"
            raise ConfigError(
                f"LinearAttention: cache must be a LinearAttentionCache of {self.linear}, got a {type(cache).__name__} "
                f"{given}; make it: LinearAttentionCache(linear, CacheSpec(...))"
            )
        if not self.pattern.is_causal:
            raise ConfigError(
                f"LinearAttention: under {self.pattern} queries see later tokens, so there is no cache; drop cache="
            )
        if positions.length_dependent:
            raise ConfigError(
                f"LinearAttention: under {positions} earlier keys are rotated anew as a row grows, but they have been "
                "summed and cannot; decode without a cache, or use a scaling that does not depend on the length"
            )
