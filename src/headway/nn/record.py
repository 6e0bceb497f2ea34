"""Intermediate values of a stack, for inspection: the hidden states between its layers, and the inputs of each
attention layer.

Legend: B rows, H query heads, K kv heads, T queries, N selected queries, S keys, M width, D per query and key, E per
value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headway.attention import KeyValues, attend_keys, attention_weights
from headway.attention.linear_attention import Prepared
from headway.patterns import Pattern
from headway.scores import Score
from headway.tokens import SlotSelection, Tokens


@dataclass(frozen=True, eq=False)
class SoftmaxAttended:
    """The inputs of `attend_keys` in one layer: queries q [B, H, T, D] and `keys`, normed and rotated.

    The weights of row 0 are computed on request; `tokens` are those of the queries."""

    q: Tensor
    tokens: Tokens
    keys: KeyValues
    pattern: Pattern
    score: tuple[Score, ...]
    scale: float | None
    sink_logit: Tensor | None = None

    def weights(self, slots: Tensor, head: int) -> Tensor:
        """Returns the weights of the queries in N slots: [N, S], float32 (float64 for float64 states)."""
        q, tokens, pattern, options = self._call(slots, head)
        k = self.keys.k[:1, self._shared(head)]
        return attention_weights(q, k, pattern, q_tokens=tokens, k_tokens=self.keys.tokens, **options)[0, 0]

    def values(self, head: int) -> Tensor:
        """Returns the values that the weights of a query head multiply: [S, E]."""
        return self.keys.v[0, self._shared(head)][0]

    def result(self, slots: Tensor, head: int) -> Tensor:
        """Returns the layer's own results for the queries in N slots, from kernels that keep no weights: [N, E]."""
        q, tokens, pattern, options = self._call(slots, head)
        keys = self.keys.map(lambda t: t[:1, self._shared(head)])
        return attend_keys(q, tokens, [keys], pattern, **options, lse=False).out[0, 0]

    def _call(self, slots: Tensor, head: int) -> tuple[Tensor, Tokens, Pattern, dict[str, Any]]:
        """Returns the queries [1, 1, N, D] of some slots and a head, their tokens, their pattern, and the options
        that scores depend on."""
        selection, of_head = SlotSelection.of(self.tokens, slots.unsqueeze(0)), slots.new_tensor([head])
        patterns = self.pattern.heads
        pattern = patterns[head] if len(patterns) > 1 else patterns[0]
        options: dict[str, Any] = {
            "score": [step.select_heads(of_head) for step in self.score],
            "scale": self.scale,
            "sink_logit": None if self.sink_logit is None else self.sink_logit[of_head],
        }
        return selection.take(self.q[:1, head : head + 1], 2), selection.tokens, pattern, options

    def _shared(self, head: int) -> slice:
        """Returns the kv head that a query head reads, as a slice."""
        kv = head // (self.q.shape[1] // self.keys.k.shape[1])
        return slice(kv, kv + 1)


@dataclass(frozen=True, eq=False)
class LinearAttended:
    """The inputs of linear attention in one layer, as features of queries and keys. Its weights, which may be
    negative, are sim(q_i, k_j) / sum_j sim(q_i, k_j)."""

    call: Prepared
    tokens: Tokens

    def weights(self, slots: Tensor, head: int) -> Tensor:
        at, q_slots, k_slots = self.call.given, self.call.q_order.slots, self.call.k_order.slots
        kv, place = divmod(head, at.q.shape[2])
        rows = slots if q_slots is None else q_slots[0].argsort()[slots]  # where the sums have these slots
        similarity, share = (q[0, kv, place, rows] @ k[0, kv].T for q, k in ((at.q, at.k), (at.zq, at.zk)))
        hidden = torch.zeros_like(share, dtype=torch.bool)
        if at.causal:
            hidden |= torch.arange(at.k.shape[2], device=slots.device) > rows.unsqueeze(1)
        if at.q_documents is not None and at.k_documents is not None:
            hidden |= at.q_documents[0, rows].unsqueeze(1) != at.k_documents[0]
        similarity, share = similarity.masked_fill(hidden, 0.0), share.masked_fill(hidden, 0.0)
        total = share.sum(-1, keepdim=True)
        weights = similarity / (total.clamp_min(self.call.linear.eps) if self.call.guarded else total)
        return weights if k_slots is None else weights[:, k_slots[0].argsort()]

    def values(self, head: int) -> Tensor:
        return self.call.k_order.restore(self.call.given.v)[0, head // self.call.given.q.shape[2]]

    def result(self, slots: Tensor, head: int) -> Tensor:
        return self.call.attend(None)[0, head, slots]


Attended = SoftmaxAttended | LinearAttended


@dataclass(eq=False)
class Record:
    """Collects intermediate values in `TransformerStack.forward`, layer by layer.

    layers: the attention layers whose inputs are kept.
    states: the input of each layer, [B, T, M], and the last states.
    attended: the inputs of attention, by layer; if a query occurs in several of them, its last one counts.
    patterns: patterns that replace those of these layers.
    """

    layers: Sequence[object] = ()
    states: list[Tensor] = field(default_factory=list)
    attended: dict[object, list[Attended]] = field(default_factory=dict)
    patterns: Mapping[Any, Pattern] = field(default_factory=dict)

    def add(self, layer: object, attended: Attended) -> None:
        if layer in self.layers:
            self.attended.setdefault(layer, []).append(attended)
