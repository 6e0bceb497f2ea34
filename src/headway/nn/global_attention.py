"""Longformer's attention: global tokens ask and answer with projections of their own.

Legend: B rows, T tokens, N global tokens of the row that has most, M width, H heads, D per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headway.attention import attend
from headway.errors import ConfigError
from headway.nn.attention import Attention
from headway.nn.rotary_embedding import Table
from headway.patterns import Full, GlobalQueries, Or, Pattern, PerHead
from headway.scores import Score
from headway.tokens import Tokens


class GlobalAttention(Attention):
    """`Attention` whose global queries attend to all tokens by a second set of projections.

        local query    attend(x Wq, x Wk, x Wv, pattern)             pattern says whether it sees global keys
        global query   attend(x Wq', x Wk', x Wv', Full())

    (Beltagy et al. 2020, section 3.1, "Linear Projections for Global Attention".) That is a choice of rows, not
    a merge: no query mixes the two sets. A local query reads global keys by its own projections, as in the
    published code. Parameters beside those of `Attention`: q_global_proj, k_global_proj, v_global_proj, of the
    shapes and with the biases of q_proj, k_proj and v_proj.
    """

    def __init__(self, width: int, heads: int, kv_heads: int | None = None, **options: Any) -> None:
        super().__init__(width, heads, kv_heads, **options)
        self.q_global_proj, self.k_global_proj, self.v_global_proj = (
            nn.Linear(own.in_features, own.out_features, bias=own.bias is not None)
            for own in (self.q_proj, self.k_proj, self.v_proj)
        )

    def forward(
        self,
        x_BTM: Tensor,
        *,
        tokens: Tokens | None = None,
        cache: Any = None,
        memory: Any = None,
        memory_tokens: Tokens | None = None,
        rotation: Table | None = None,
        score: Sequence[Score] = (),
    ) -> Tensor:
        """[B, T, M] -> [B, T, M]; arguments as in `Attention`, without cache and memory.

        Raises ConfigError for either: a cache keeps one key per token, and global queries need another."""
        if cache is not None or memory is not None or memory_tokens is not None:
            raise ConfigError(
                "GlobalAttention: global queries see later tokens and need keys of their own, so there is no "
                "cache and no memory here; drop cache= and memory="
            )
        y_BTM = super().forward(x_BTM, tokens=tokens, rotation=rotation, score=score)
        if tokens is None or tokens.is_global is None or not bool(tokens.is_global.any()):
            return y_BTM
        at_BN, chosen = _global_slots(tokens, x_BTM.shape[0])
        index = at_BN.unsqueeze(-1).expand(-1, -1, self.width)
        y_BNM = self._ask_all(x_BTM, x_BTM.gather(1, index), tokens, at_BN, chosen, rotation, score)
        there = chosen.valid.unsqueeze(-1)
        return y_BTM.scatter(1, index, torch.where(there, y_BNM, y_BTM.gather(1, index)).to(y_BTM.dtype))

    @property
    def asked(self) -> Pattern:
        """The pattern without what global queries see, whose answers come from the other projections."""
        return _without_global_queries(self.pattern)

    def _ask_all(
        self,
        x_BTM: Tensor,
        x_BNM: Tensor,
        tokens: Tokens,
        at_BN: Tensor,
        chosen: Tokens,
        rotation: Table | None,
        score: Sequence[Score],
    ) -> Tensor:
        """What global tokens [B, N, M] see in all tokens, [B, N, M]."""
        q = self._heads(self.q_global_proj(x_BNM), self.head_dim, self.q_norm)
        k = self._heads(self.k_global_proj(x_BTM), self.head_dim, self.k_norm)
        v = self._heads(self.v_global_proj(x_BTM), self.value_dim)
        if rotation is None:
            rotation = self.turns(tokens, x_BTM.dtype)
        if rotation is not None:
            own = self.turns(chosen, x_BTM.dtype)
            assert own is not None
            q, k = own.apply(q), rotation.apply(k)
            v = rotation.apply(v) if rotation.turns_values else v
        slots, q_tokens = None, chosen
        pattern: Pattern = Full()
        if self.backend == "diagonal":  # which takes queries only at the slots of their keys
            slots = at_BN[:, None, :, None]
            spread = slots.expand(-1, q.shape[1], -1, q.shape[3])
            q = q.new_zeros(*q.shape[:2], tokens.count, q.shape[3]).scatter(2, spread, q)
            pattern, q_tokens = GlobalQueries(), tokens
        out = attend(
            q,
            k,
            v,
            pattern,
            q_tokens=q_tokens,
            k_tokens=tokens,
            score=[*score, *self.score()],
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        if slots is not None:
            out = out.gather(2, slots.expand(-1, out.shape[1], -1, out.shape[3]))
        y_BNM: Tensor = self.drop_output(self.o_proj(out.transpose(1, 2).flatten(2)))
        return y_BNM


def _without_global_queries(pattern: Pattern) -> Pattern:
    """The same for local queries: `GlobalQueries` allows none of them anything. Alone, it stays."""
    if isinstance(pattern, PerHead):
        return PerHead(*map(_without_global_queries, pattern.parts))
    if not isinstance(pattern, Or):
        return pattern
    left = tuple(part for part in pattern.parts if part != GlobalQueries())
    return left[0] if len(left) == 1 else Or(left)


def _global_slots(tokens: Tokens, rows: int) -> tuple[Tensor, Tokens]:
    """Slots [B, N] of the global tokens, row by row, and their tokens; a row with fewer ends in empty tokens on
    slots that are not global."""
    assert tokens.is_global is not None
    wanted = (tokens.is_global & tokens.valid).expand(rows, -1)
    most = int(wanted.sum(1).max())
    at = wanted.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    chosen = replace(tokens.gather(at), is_global=None)
    return at, replace(chosen, index=torch.where(wanted.gather(1, at), chosen.index, -1))
