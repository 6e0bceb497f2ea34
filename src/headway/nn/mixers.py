"""Mixers of attention layers: they compute a query's result from keys and values.

Each mixer checks in one place what it does not support: positions, scores and dropout when its layer is created
(`check`), caches and memory when it is called.

Legend: B rows, T tokens, N global tokens of the row that has most, M width, H query heads, K kv heads, D per query and
key, E per value.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from headway.attention import BACKENDS, KeyValues, attend_keys
from headway.cache import PagedLayer, StateSpec
from headway.cache.paged_cache import LayerCache
from headway.errors import ConfigError
from headway.nn.norms import QKNorm
from headway.nn.positions import RotaryEmbedding, Scores, rotated, token_lengths
from headway.nn.record import Record, SoftmaxAttended
from headway.parallel import ContextParallel
from headway.patterns import Full, GlobalQueries, Pattern
from headway.patterns.primitives import Kind
from headway.patterns.program import without
from headway.positions import PositionScheme, Rotation
from headway.scores import Score
from headway.tokens import SlotSelection, Tokens


class MixingLayer(nn.Module):
    """A layer that mixes tokens in a `Block`, called as `AttentionLayer.forward` is without memory.

    rotary: the rotations of its positions; None if it has none.
    """

    rotary: RotaryEmbedding | None

    def state(self, dtype: torch.dtype) -> StateSpec | None:
        """Returns the state that its cache holds for each sequence, if keys are in `dtype`; None stands for keys and
        values."""
        return None

    def initialize_(self, generator: torch.Generator | None = None) -> None:
        """Initializes, in place, the parameters that need other values than those of
        `headway.models.build.initialize_`."""


SharedKeys = dict[Any, KeyValues | None]
"""Layers whose keys and values later layers attend to, too, with these keys and values once they are computed."""


class Call(NamedTuple):
    """The arguments of a layer besides x, as in `AttentionLayer.forward`; `rotation` is None if positions do not
    rotate."""

    tokens: Tokens
    cache: LayerCache | None
    memory: KeyValues | None
    rotation: Rotation | None
    score: Sequence[Score]
    context: ContextParallel | None = None
    selected: SlotSelection | None = None
    record: Record | None = None
    shared: SharedKeys | None = None


class Projections(Protocol):
    """The part of its layer that a mixer uses: see `AttentionLayer`."""

    dropout: float
    training: bool
    rotary: RotaryEmbedding
    score: Scores
    kv_from: nn.Module | None

    @property
    def sink_logit(self) -> Tensor | None: ...

    def projected(
        self, x: Tensor, names: str = "qkv", of_global: bool = False, rotation: Rotation | None = None
    ) -> list[Tensor]: ...


class Mixer(ABC):
    """Computes each query's mean of values from the inputs of a layer; heads are not concatenated yet.

    pattern              which keys each query may see
    global_projections   whether it needs a second set of projections
    rotates_queries      whether it rotates queries and keys first, so that these can be normed and queries multiplied
                         by a factor of their position
    """

    pattern: Pattern
    global_projections = False
    rotates_queries = False

    def check(
        self, positions: PositionScheme, score: Sequence[Score], dropout: float, qk_norm: QKNorm = "none"
    ) -> None:
        """Raises HeadwayError for positions, scores, dropout of weights or norms that the mixer does not support."""
        if qk_norm == "rotated" and (positions.length_dependent or not self.rotates_queries):
            raise ConfigError(
                f'{type(self).__name__}: qk_norm="rotated" needs softmax attention without global_projections and with '
                f'rotations that do not depend on the length, got {positions}; use "head"'
            )
        if positions.grows and not self.rotates_queries:
            raise ConfigError(
                f"{type(self).__name__}: query_growth of {positions} needs softmax attention without "
                "global_projections; drop query_growth"
            )

    @abstractmethod
    def attend(self, layer: Projections, x_BTM: Tensor, call: Call) -> Tensor:
        """Returns the results [B, H, T, E] of attention to `call.memory`, without positions, or if that is None to
        the tokens of x; with N `call.selected` slots only theirs, [B, H, N, E]."""


@dataclass(frozen=True)
class SoftmaxMixer(Mixer):
    """Softmax attention, softmax(score(scale * q k^T)) v over the pattern: `attend`. Rotates queries and keys, and
    values if the scheme says so; its cache holds keys and values. `first_head` is as in `attend_keys`."""

    pattern: Pattern
    scale: float | None = None
    backend: str = "auto"
    first_head: int = 0
    rotates_queries = True

    def attend(self, layer: Projections, x_BTM: Tensor, call: Call) -> Tensor:
        tokens, cache, rotation = call.tokens, call.cache, call.rotation
        if call.memory is not None:
            (q_BHTD,) = layer.projected(x_BTM, "q")
            self.keep(layer, q_BHTD, call.memory, call)
            return self.softmax(layer, q_BHTD, call.memory, call)
        if layer.kv_from is not None:
            return self._attend_shared(layer, x_BTM, call)
        if cache is not None and not isinstance(cache, PagedLayer):
            raise ConfigError(
                f"Attention: cache must keep keys and values, got a {type(cache).__name__}; give a layer of "
                "PagedCache(spec, patterns)"
            )
        # If frequencies depend on the row's length, the cache holds unrotated keys, which are rotated when read.
        rotate_late = cache is not None and rotation is not None and layer.rotary.positions.length_dependent
        q_BHTD, k_BKTD, v_BKTE = layer.projected(x_BTM, rotation=None if rotate_late else rotation)
        if rotate_late:
            assert rotation is not None
            (q_BHTD,) = rotated(rotation, q_BHTD)
        keys = KeyValues(k_BKTD, v_BKTE, tokens) if cache is None else cache.update(k_BKTD, v_BKTE, tokens)
        if rotate_late:
            keys = keys.gathered().dequantized(q_BHTD.dtype)
            late = layer.rotary(keys.tokens, q_BHTD.dtype)
            keys = replace(keys, k=late.apply(keys.k))
        if call.shared is not None and isinstance(layer, nn.Module) and layer in call.shared:
            call.shared[layer] = keys
        return self._of_slots(layer, q_BHTD, keys, call)

    def _attend_shared(self, layer: Projections, x_BTM: Tensor, call: Call) -> Tensor:
        """Attends to the keys and values that an earlier layer used in this forward pass, including its cached past."""
        keys = None if call.shared is None or layer.kv_from is None else call.shared.get(layer.kv_from)
        if keys is None:
            raise ConfigError(
                "Attention: the keys and values of kv_from are missing; call that layer first, both with the same "
                "shared={that: None}"
            )
        (q_BHTD,) = layer.projected(x_BTM, "q", rotation=call.rotation)
        return self._of_slots(layer, q_BHTD, keys, call)

    def _of_slots(self, layer: Projections, q_BHTD: Tensor, keys: KeyValues, call: Call) -> Tensor:
        """Returns the results of the queries, only of the selected slots if there are any."""
        self.keep(layer, q_BHTD, keys, call)
        if call.selected is None:
            return self.softmax(layer, q_BHTD, keys, call)
        if self._numbers_slots(layer, call):
            return call.selected.take(self.softmax(layer, q_BHTD, keys, call), 2)
        return self.softmax(
            layer, call.selected.take(q_BHTD, 2), keys, call._replace(tokens=call.selected.tokens)
        )

    def _numbers_slots(self, layer: Projections, call: Call) -> bool:
        """Returns whether a query's result depends on its slot, or the backend requires queries to be the slots of
        the keys."""
        steps = (*call.score, *layer.score.steps)
        backend = BACKENDS.get(self.backend)
        any_queries = backend is None or backend.capabilities.any_queries
        return (
            not any_queries or (layer.training and layer.dropout > 0) or any(step.by_slot for step in steps)
        )

    def keep(self, layer: Projections, q: Tensor, keys: KeyValues, call: Call) -> None:
        """Adds the inputs of `softmax` to the record of the call, if there is one."""
        if call.record is not None:
            score = (*call.score, *layer.score())
            inputs = q, call.tokens, keys, self.pattern, score, self.scale, layer.sink_logit
            call.record.add(layer, SoftmaxAttended(*inputs))

    def softmax(self, layer: Projections, q: Tensor, keys: KeyValues, call: Call) -> Tensor:
        """Calls `attend_keys` with the scores and the dropout of a layer."""
        score = (*call.score, *(layer.score() if layer.score.steps else ()))
        dropout = layer.dropout if layer.training else 0.0
        options: dict[str, Any] = {
            "score": score,
            "sink_logit": layer.sink_logit,
            "scale": self.scale,
            "dropout": dropout,
            "backend": self.backend,
        }
        if call.context is not None:
            part = call.context.attend(q, keys.k, keys.v, self.pattern, **options)
            return part.out.to(q.dtype)
        options |= {"first_head": self.first_head, "lse": False}
        return attend_keys(q, call.tokens, [keys], self.pattern, **options).out


@dataclass(frozen=True)
class GlobalMixer(SoftmaxMixer):
    """Global queries attend to all tokens by a second set of projections.

        local query    attend(x Wq, x Wk, x Wv, pattern)             pattern says whether it sees global keys
        global query   attend(x Wq', x Wk', x Wv', Full())

    (Beltagy et al. 2020, section 3.1, "Linear Projections for Global Attention".) The result of each query comes from
    one of the two sets, so nothing is merged. A local query reads global keys by its own projections, as in the
    published code. It supports no cache, which holds one key per token, and no memory.
    """

    global_projections = True
    rotates_queries = False

    def attend(self, layer: Projections, x_BTM: Tensor, call: Call) -> Tensor:
        if call.cache is not None or call.memory is not None:
            raise ConfigError(
                "GlobalAttention: caches and cross-attention are not supported, since global queries see later tokens "
                "and have their own keys; drop cache= and memory="
            )
        if call.context is not None:
            raise ConfigError(
                "GlobalAttention: context parallel is not supported, since it does not gather the keys of global "
                "queries; train this model without it"
            )
        tokens, rotation = call.tokens, call.rotation
        if call.selected is not None:
            return call.selected.take(self.attend(layer, x_BTM, call._replace(selected=None)), 2)
        out_BHTE = self.local.attend(layer, x_BTM, call)
        if tokens.is_global is None or not bool(tokens.is_global.any()):
            return out_BHTE
        at_BN, chosen = _global_slots(tokens, x_BTM.shape[0])
        x_BNM = x_BTM.gather(1, at_BN.unsqueeze(-1).expand(-1, -1, x_BTM.shape[2]))
        (q_BHND,) = layer.projected(x_BNM, "q", of_global=True)
        k_BKTD, v_BKTE = layer.projected(x_BTM, "kv", of_global=True)
        if rotation is not None:
            length = None
            if layer.rotary.positions.length_dependent:
                length = token_lengths(tokens).expand(*x_BTM.shape[:2]).gather(1, at_BN)
            at_queries = layer.rotary(chosen, q_BHND.dtype, length)
            assert at_queries is not None
            q_BHND, k_BKTD = at_queries.apply(q_BHND), rotation.apply(k_BKTD)
            v_BKTE = rotation.apply(v_BKTE) if rotation.rotates_values else v_BKTE
        keys, index = KeyValues(k_BKTD, v_BKTE, tokens), at_BN[:, None, :, None]
        global_mixer = replace(self.local, pattern=Full())
        global_mixer.keep(layer, q_BHND, keys, call._replace(tokens=chosen))
        backend = BACKENDS.get(self.backend)
        if backend is not None and not backend.capabilities.any_queries:
            q = q_BHND.new_zeros(*q_BHND.shape[:2], tokens.count, q_BHND.shape[3])
            q = q.scatter(2, index.expand(q_BHND.shape), q_BHND)
            out = replace(self.local, pattern=GlobalQueries()).softmax(layer, q, keys, call)
            out_BHNE = out.gather(2, index.expand(-1, out.shape[1], -1, out.shape[3]))
        else:
            out_BHNE = global_mixer.softmax(layer, q_BHND, keys, call._replace(tokens=chosen))
        index = index.expand(out_BHNE.shape)
        valid = chosen.valid[:, None, :, None]
        return out_BHTE.scatter(2, index, torch.where(valid, out_BHNE, out_BHTE.gather(2, index)))

    @cached_property
    def local(self) -> SoftmaxMixer:
        """The mixer of local queries: the pattern without global queries, whose results come from the other
        projections."""
        pattern = without(self.pattern, Kind.GLOBAL_QUERIES)
        return SoftmaxMixer(pattern, self.scale, self.backend, self.first_head)


def _global_slots(tokens: Tokens, rows: int) -> tuple[Tensor, Tokens]:
    """Returns the slots [B, N] of the global tokens, row by row, and their tokens; a row with fewer than N ends with
    empty tokens, whose slots are not global."""
    assert tokens.is_global is not None
    is_global = (tokens.is_global & tokens.valid).expand(rows, -1)
    most = int(is_global.sum(1).max())
    at = is_global.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    chosen = replace(tokens.gather(at), is_global=None)
    return at, replace(chosen, index=torch.where(is_global.gather(1, at), chosen.index, -1))
