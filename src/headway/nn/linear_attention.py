"""The layer of linear attention, and its mixer: sums over keys instead of a softmax.

Legend: B rows, T tokens, R sequences of a step, M width, H query heads, K kv heads, D per query and key, E per value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from headway.attention.linear_attention import (
    LinearAttentionSpec,
    LinearState,
    check_form,
    check_pattern,
    forbid_weights,
    prepare,
)
from headway.cache import PagedStates, StateSpec, state_dtype
from headway.cache.paged_cache import LayerCache
from headway.errors import ConfigError
from headway.nn.attention_layer import AttentionLayer
from headway.nn.attention_options import AttentionOptions
from headway.nn.mixers import Call, Mixer, Projections
from headway.nn.mixing import states_of
from headway.nn.norms import QKNorm
from headway.nn.record import LinearAttended
from headway.patterns import Causal, Pattern
from headway.positions import PositionScheme
from headway.scores import Score
from headway.tokens import Tokens


@dataclass(frozen=True)
class LinearMixer(Mixer):
    """The sums of linear attention instead of a softmax: `linear_attend`. Positions rotate features instead of queries
    and keys, where `linear.rotary` says. Its cache holds the sums.

    Raises PatternError for a pattern other than Causal() and Full(), and for an unknown form.
    """

    pattern: Pattern
    linear: LinearAttentionSpec = LinearAttentionSpec()  # noqa: RUF009  (a frozen value)
    form: str = "auto"

    def __post_init__(self) -> None:
        check_pattern(self.linear, self.pattern)
        check_form(self.form)

    def check(
        self, positions: PositionScheme, score: Sequence[Score], dropout: float, qk_norm: QKNorm = "none"
    ) -> None:
        """Raises HeadwayError for scores and dropout, because there are no weights that they could act on, and for
        rotations that do not suit the features."""
        super().check(positions, score, dropout, qk_norm)
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
                'LinearAttention: feature="cosine" needs rotations that keep lengths, but '
                f"{positions} multiplies them by {positions.amplitude:.4g}; use a scaling without an amplitude, or "
                "another feature"
            )

    def attend(self, layer: Projections, x_BTM: Tensor, call: Call) -> Tensor:
        tokens, cache, memory, rotation, score, context, selected, record, _ = call
        forbid_weights(score, 0.0)
        if context is not None:
            raise ConfigError(
                "LinearAttention: context parallel is not supported; train this model without it"
            )
        states = None if cache is None else self._states_of(cache, layer.rotary.positions)
        if memory is not None:
            (q,) = layer.projected(x_BTM, "q")
            options = self.linear, self.pattern, tokens, memory.tokens, None
            return prepare(q, memory.k, memory.v, *options).attend(None, self.form)
        q_BHTD, k_BKTD, v_BKTE = layer.projected(x_BTM)
        if states is not None:
            out = self._by_rows(layer, (q_BHTD, k_BKTD, v_BKTE), states, tokens)
            return out if selected is None else selected.take(out, 2)
        if rotation is not None and rotation.rotates_values:
            v_BKTE = rotation.apply(v_BKTE)
        prepared = prepare(q_BHTD, k_BKTD, v_BKTE, self.linear, self.pattern, tokens, tokens, rotation)
        if record is not None:
            record.add(layer, LinearAttended(prepared, tokens))
        out_BHTE = prepared.attend(None, self.form)
        return out_BHTE if selected is None else selected.take(out_BHTE, 2)

    def _by_rows(
        self, layer: Projections, packed: Sequence[Tensor], states: PagedStates, tokens: Tokens
    ) -> Tensor:
        """Computes a step of a `PagedCache` with a row for each sequence, because each row has one sum."""
        rows = states.cache.step_of(tokens).rows
        q, k, v = (rows.unpack(t, 2) for t in packed)
        rotation = layer.rotary(rows.tokens, q.dtype)
        if rotation is not None and rotation.rotates_values:
            v = rotation.apply(v)
        prepared = prepare(q, k, v, self.linear, self.pattern, rows.tokens, rows.tokens, rotation)
        past = LinearState(*states.read())
        states.write(past.merge(prepared.state()).tensors)
        return rows.pack(prepared.attend(past, self.form), 2)

    def _states_of(self, cache: LayerCache, positions: PositionScheme) -> PagedStates:
        """Returns the cache. Raises ConfigError if it does not keep these sums, or if none could."""
        states = states_of("LinearAttention", cache, self.linear, "sums")
        if not self.pattern.is_causal:
            raise ConfigError(
                f"LinearAttention: under {self.pattern} queries see later tokens, so no cache is possible; drop cache="
            )
        if positions.length_dependent:
            raise ConfigError(
                f"LinearAttention: under {positions} the rotation of earlier keys changes as a row grows, but a cache "
                "keeps only their sum; decode without a cache, or use a scaling that does not depend on the length"
            )
        return states


class LinearAttention(AttentionLayer):
    """Attention in time linear in the length, with the projections of `Attention`, so that state dicts are
    interchangeable: see `LinearMixer`.

    Args:
        linear: the similarity;  pattern: Causal() or Full();  form: as in `linear_attend`.
        others: as in `AttentionLayer`; there are no weights that score or dropout could act on.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        linear: LinearAttentionSpec = LinearAttentionSpec(),  # noqa: B008  (a frozen value)
        pattern: Pattern = Causal(),  # noqa: B008
        form: str = "auto",
        **options: Unpack[AttentionOptions],
    ) -> None:
        super().__init__(LinearMixer(pattern, linear, form), width, heads, kv_heads, **options)
        self.linear = linear

    def state(self, dtype: torch.dtype) -> StateSpec:
        """Returns the shapes and dtypes of `LinearState`, in float32 or float64."""
        heads, features, kept = self.heads.kv_heads, self.linear.features(self.head_dim), state_dtype(dtype)
        sums = ((heads, features, self.value_dim), kept), ((heads, features), kept), ((), torch.int64)
        return StateSpec(self.linear, sums)
