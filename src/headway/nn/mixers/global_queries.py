"""Longformer's attention: global tokens attend by projections of their own.

Legend: B rows, T tokens, N global tokens of the row that has most, M width, H query heads, K kv heads, D per query and
key, E per value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from headway.attention import BACKENDS, KeyValues
from headway.errors import ConfigError
from headway.nn.mixers.base import Call, Projections
from headway.nn.mixers.softmax import SoftmaxMixer
from headway.nn.rotary_embedding import token_lengths
from headway.patterns import Full, GlobalQueries
from headway.patterns.primitives import Kind
from headway.patterns.program import without
from headway.tokens import Tokens


@dataclass(frozen=True)
class GlobalMixer(SoftmaxMixer):
    """Global queries attend to all tokens by a second set of projections.

        local query    attend(x Wq, x Wk, x Wv, pattern)             pattern says whether it sees global keys
        global query   attend(x Wq', x Wk', x Wv', Full())

    (Beltagy et al. 2020, section 3.1, "Linear Projections for Global Attention".) That is a choice of rows, not
    a merge: no query mixes the two sets. A local query reads global keys by its own projections, as in the
    published code. There is no cache, which keeps one key per token, and no memory.
    """

    global_projections = True

    def attend(self, layer: Projections, x_BTM: Tensor, call: Call) -> Tensor:
        if call.cache is not None or call.memory is not None:
            raise ConfigError(
                "GlobalAttention: global queries see later tokens and need keys of their own, so there is no cache and "
                "no memory here; drop cache= and memory="
            )
        tokens, rotation = call.tokens, call.rotation
        out_BHTE = self.local.attend(layer, x_BTM, call)
        if tokens.is_global is None or not bool(tokens.is_global.any()):
            return out_BHTE
        at_BN, chosen = _global_slots(tokens, x_BTM.shape[0])
        x_BNM = x_BTM.gather(1, at_BN.unsqueeze(-1).expand(-1, -1, x_BTM.shape[2]))
        q_BHND = layer.queries(x_BNM, of_global=True)
        k_BKTD, v_BKTE = layer.keys_values(x_BTM, of_global=True)
        if rotation is not None:
            length = None
            if layer.rotary.positions.length_dependent:
                length = token_lengths(tokens).expand(*x_BTM.shape[:2]).gather(1, at_BN)
            at_queries = layer.rotary(chosen, q_BHND.dtype, length)
            assert at_queries is not None
            q_BHND, k_BKTD = at_queries.apply(q_BHND), rotation.apply(k_BKTD)
            v_BKTE = rotation.apply(v_BKTE) if rotation.rotates_values else v_BKTE
        keys, index = KeyValues(k_BKTD, v_BKTE, tokens), at_BN[:, None, :, None]
        backend = BACKENDS.get(self.backend)
        if backend is not None and not backend.capabilities.any_queries:
            q = q_BHND.new_zeros(*q_BHND.shape[:2], tokens.count, q_BHND.shape[3])
            q = q.scatter(2, index.expand(q_BHND.shape), q_BHND)
            out = replace(self.local, pattern=GlobalQueries()).softmax(layer, q, keys, call)
            out_BHNE = out.gather(2, index.expand(-1, out.shape[1], -1, out.shape[3]))
        else:
            every = replace(self.local, pattern=Full())
            out_BHNE = every.softmax(layer, q_BHND, keys, call._replace(tokens=chosen))
        index = index.expand(out_BHNE.shape)
        there = chosen.valid[:, None, :, None]
        return out_BHTE.scatter(2, index, torch.where(there, out_BHNE, out_BHTE.gather(2, index)))

    @cached_property
    def local(self) -> SoftmaxMixer:
        """Of local queries: the pattern without what global queries see, whose answers are by the other projections."""
        return SoftmaxMixer(without(self.pattern, Kind.GLOBAL_QUERIES), self.scale, self.backend)


def _global_slots(tokens: Tokens, rows: int) -> tuple[Tensor, Tokens]:
    """Slots [B, N] of the global tokens, row by row, and their tokens; a row with fewer ends in empty tokens on
    slots that are not global."""
    assert tokens.is_global is not None
    wanted = (tokens.is_global & tokens.valid).expand(rows, -1)
    most = int(wanted.sum(1).max())
    at = wanted.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    chosen = replace(tokens.gather(at), is_global=None)
    return at, replace(chosen, index=torch.where(wanted.gather(1, at), chosen.index, -1))
