"""The attention layer: projections around `attend`.

Legend: B rows, T queries, S keys, M width of the model, H query heads, K kv heads, D per query and key, E per
value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from headway.attention import KeyValues, attend_keys
from headway.cache import KVCache, LayerCache
from headway.errors import ConfigError
from headway.heads import Heads
from headway.nn.norms import RMSNorm
from headway.nn.rotary_embedding import RotaryEmbedding, Table, token_lengths
from headway.nn.scores import Scores
from headway.patterns import Causal, Pattern
from headway.positions import NoPositions, PositionScheme, Rotary
from headway.scores import Score
from headway.tokens import Tokens


class Attention(nn.Module):
    """Multi-head attention with a declared pattern: MHA, GQA or MQA by `kv_heads`.

        q, k, v = x Wq, x Wk, x Wv               per head; then, in this order, where asked for:
        q, k    = norm(q), norm(k)               one gain of size D for all heads (Qwen3)
        q, k    = rotate(q, p), rotate(k, p)     by each token's position
        y       = attend(q, k, v, pattern) Wo

    Parameters: q_proj [H D, M], k_proj [K D, M], v_proj [K E, M], o_proj [M, H E], without biases unless
    asked for; with qk_norm, gains q_norm and k_norm [D]. The pattern changes none of them.

    Args:
        width: M.
        heads, kv_heads: H and K; K = H unless given, and must divide it.
        head_dim, value_dim: D (M / H unless given) and E (D unless given).
        pattern: which keys each query may see.
        positions: schemes that mark queries and keys, or scores, act here; the others elsewhere.
        qkv_bias, out_bias: biases of the projections.
        qk_norm: RMSNorm on every query and key, with eps `norm_eps`.
        score, scale, backend: as in `attend`; scale is D^-0.5 unless given. Tensors of a score are part of the
            module: trained when they are an `nn.Parameter`, moved and saved with it in any case.
        dropout: probability for attention weights, after the softmax; only in training mode.
        output_dropout: probability for the output, after Wo; only in training mode.

    Raises:
        HeadwayError: K does not divide H; D is odd and positions rotate; M is not a multiple of H and no
            head_dim is given; an unknown backend.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        pattern: Pattern = Causal(),  # noqa: B008  (a frozen value)
        positions: PositionScheme = NoPositions(),  # noqa: B008
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        score: Score | Sequence[Score] = (),
        scale: float | None = None,
        dropout: float = 0.0,
        output_dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.heads = Heads.of(heads, kv_heads)
        if head_dim is None and width % heads:
            raise ConfigError(
                f"Attention: width {width} is not a multiple of {heads} heads; give head_dim, "
                "the size of one head"
            )
        for name, p in (("dropout", dropout), ("output_dropout", output_dropout)):
            if not 0.0 <= p < 1.0:
                raise ConfigError(f"Attention: {name} is a probability from 0 to below 1, got {p}")
        self.width = width
        self.head_dim = width // heads if head_dim is None else head_dim
        self.value_dim = self.head_dim if value_dim is None else value_dim
        if self.head_dim < 1 or self.value_dim < 1:
            raise ConfigError(
                f"Attention: heads have 1 dim or more, got head_dim={self.head_dim}, value_dim={self.value_dim}"
            )
        self.pattern, self.backend, self.scale = pattern, backend, scale
        self.turns = RotaryEmbedding(positions, self.head_dim)
        self.dropout = dropout
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(width, self.heads.kv_heads * self.head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(width, self.heads.kv_heads * self.value_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(heads * self.value_dim, width, bias=out_bias)
        self.q_norm = RMSNorm(self.head_dim, norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, norm_eps) if qk_norm else None
        self.drop_output = nn.Dropout(output_dropout)
        own = positions.scores(heads, self.head_dim, not pattern.is_causal)
        self.score = Scores((*own, *((score,) if isinstance(score, Score) else score)))

    @property
    def positions(self) -> PositionScheme:
        return self.turns.positions

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
            cache: past keys and values; the chunk is added to it, and its queries see both.
            memory: [B, S, M], what keys and values are made of: cross-attention (pattern `Full`, or global
                tokens; no positions, no cache). Or `keys(memory)`, which are the same at every step.
            memory_tokens: of memory; all of it unless given.
            rotation: `turns(...)` of these tokens, when several layers share it.
            score: steps that several layers share, before this layer's own.
        """
        if x_BTM.dim() != 3 or x_BTM.shape[-1] != self.width:
            raise ConfigError(f"Attention: x must be [batch, tokens, {self.width}], got {list(x_BTM.shape)}")
        if rotation is not None and (memory is not None or self.positions.marks != "queries and keys"):
            what = "memory is given" if memory is not None else f"positions are {self.positions}"
            raise ConfigError(f"Attention: rotation is given, but {what}, and nothing is turned")
        if cache is not None and not isinstance(cache, KVCache):
            raise ConfigError(
                f"Attention: cache must keep keys and values, and a {type(cache).__name__} keeps none; make one with "
                "headway.cache.make_cache"
            )
        if memory is not None:
            return self._cross(x_BTM, tokens, cache, memory, memory_tokens, score)
        if memory_tokens is not None:
            raise ConfigError("Attention: memory_tokens describe `memory`, which is not given")
        count, device = x_BTM.shape[1], x_BTM.device
        if tokens is None:
            fresh = Tokens.range(count, device=device)
            tokens = fresh if cache is None else cache.next_tokens(count)
        q_BHTD, k_BKSD, v_BKSE = self._project(x_BTM)
        rotary = self.positions if isinstance(self.positions, Rotary) else None
        # Where frequencies move with the row's length, caches keep keys as they are: they are turned when read.
        late = rotary is not None and rotary.length_dependent and cache is not None
        if rotation is None:
            rotation = self.turns(tokens, q_BHTD.dtype)
        if rotation is not None:
            q_BHTD = rotation.apply(q_BHTD)
            k_BKSD = k_BKSD if late else rotation.apply(k_BKSD)
            v_BKSE = rotation.apply(v_BKSE) if rotation.turns_values else v_BKSE
        if cache is None:
            return self._attend(q_BHTD, tokens, KeyValues(k_BKSD, v_BKSE, tokens), score)
        keys = cache.update(k_BKSD, v_BKSE, tokens)
        if late and rotary is not None:
            keys = keys.dequantized(q_BHTD.dtype)
            at = torch.where(keys.tokens.valid, keys.tokens.positions, 0)
            packed = keys.tokens.document is not None
            length = token_lengths(keys.tokens) if packed else cache.length
            keys = replace(keys, k=rotary.rotate(keys.k, at, length))
        return self._attend(q_BHTD, tokens, keys, score)

    def keys(self, memory: Tensor, memory_tokens: Tokens | None = None) -> KeyValues:
        """Keys and values of an encoder's states [B, S, M], computed once for all steps of a decoder."""
        if memory.dim() != 3 or memory.shape[-1] != self.width:
            raise ConfigError(
                f"Attention: memory must be [batch, keys, {self.width}], got {list(memory.shape)}"
            )
        tokens = memory_tokens or Tokens.range(memory.shape[1], device=memory.device)
        k = self._heads(self.k_proj(memory), self.head_dim, self.k_norm)
        return KeyValues(k, self._heads(self.v_proj(memory), self.value_dim), tokens)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self._heads(self.q_proj(x), self.head_dim, self.q_norm)
        k = self._heads(self.k_proj(x), self.head_dim, self.k_norm)
        return q, k, self._heads(self.v_proj(x), self.value_dim)

    def _heads(self, x: Tensor, size: int, norm: nn.Module | None = None) -> Tensor:
        """[B, T, heads * size] -> [B, heads, T, size], normed."""
        x = x.unflatten(-1, (-1, size))
        return (x if norm is None else norm(x)).transpose(1, 2)

    def _attend(self, q: Tensor, q_tokens: Tokens, keys: KeyValues, score: Sequence[Score]) -> Tensor:
        part = attend_keys(
            q,
            q_tokens,
            [keys],
            self.asked,
            score=(*score, *self.score()),
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
            lse=False,
        )
        y: Tensor = self.drop_output(self.o_proj(part.out.transpose(1, 2).flatten(2)))
        return y

    @property
    def asked(self) -> Pattern:
        """The pattern of what is asked with this layer's own projections: all of it."""
        return self.pattern

    def _cross(
        self,
        x: Tensor,
        tokens: Tokens | None,
        cache: LayerCache | None,
        memory: Tensor | KeyValues,
        memory_tokens: Tokens | None,
        score: Sequence[Score],
    ) -> Tensor:
        if cache is not None:
            raise ConfigError(
                "Attention: memory is there as a whole, so cross-attention takes no cache; drop cache="
            )
        if self.pattern.reach != (None, None) or self.positions.marks in ("queries and keys", "scores"):
            raise ConfigError(
                "Attention: positions of x and memory are not comparable, so cross-attention needs "
                f"pattern=Full() (or global tokens) and no rotary positions or marks on scores; got {self.pattern} and "
                f"{self.positions}"
            )
        keys = self._memory_keys(memory, memory_tokens, x.shape[0])
        at_x = Tokens.range(x.shape[1], device=x.device) if tokens is None else tokens
        return self._attend(self._heads(self.q_proj(x), self.head_dim, self.q_norm), at_x, keys, score)

    def _memory_keys(self, memory: Tensor | KeyValues, tokens: Tokens | None, rows: int) -> KeyValues:
        if isinstance(memory, Tensor):
            memory = self.keys(memory, tokens)
        elif tokens is not None:
            raise ConfigError("Attention: memory is KeyValues, which have their tokens; drop memory_tokens=")
        if memory.k.shape[0] != rows:
            raise ConfigError(f"Attention: memory has {memory.k.shape[0]} rows, x has {rows}")
        return memory

    def extra_repr(self) -> str:
        return f"{self.heads.kind} {self.heads.query_heads}/{self.heads.kv_heads}, pattern={self.pattern}"
