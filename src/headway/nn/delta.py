"""The layer of the gated delta rule: short convolutions, gates, the rule, and a gated norm.

Legend: B rows, T tokens, M width, K key heads, H value heads, D per key, E per value, W tokens of a convolution, C
channels of queries, keys and values.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.attention.delta import DeltaSpec, delta_attend, short_convolution
from headway.cache import StateSpec, state_dtype
from headway.nn.fused import gated
from headway.nn.linear import Linear, products
from headway.nn.mixing import InOrder, StateLayer, drawn
from headway.nn.norms import RMSNorm

UNIT_EPS = 1e-6
"""Added to the squared length of queries and keys, as in flash-linear-attention and transformers."""


class DeltaPast(NamedTuple):
    """All that the layer keeps of earlier tokens of each row: the state [B, H, D, E], float32 or float64, and what the
    convolution saw last [B, W - 1, C]."""

    state: Tensor
    tail: Tensor


class GatedDelta(StateLayer):
    """The gated delta rule with short convolutions.

        q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv))       over W tokens, channel by channel
        beta    = sigmoid(x Wb)                                              of each head
        ln a    = - e^rate softplus(x Wa + bias)                             of each head, or each channel of its keys
        o       = delta_attend(q / |q|, k / |k|, v, ln a, beta)
        y       = (norm(o) * gate(x Wg)) Wo                                  norm: over E, one gain for all heads

    Parameters: q_proj, k_proj [K D, M], v_proj [H E, M], conv [C, W], beta_proj [H, M], decay_proj [H or H D, M],
    log_rate [H], decay_bias [H or H D], gate_proj [H E, M], norm [E], o_proj [M, H E]; with `delta.rank` r decay_proj
    and gate_proj stand behind decay_down and gate_down [r, M]. No biases, and no positions: the state has the order.

    Args:
        width: M.
        delta: sizes and gates.
        norm_eps: of the norm.
        output_dropout: probability for the output, in training mode.

    (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", figure 1; Kimi Linear, 2025, section 4.)
    """

    def __init__(
        self, width: int, delta: DeltaSpec, *, norm_eps: float = 1e-6, output_dropout: float = 0.0
    ) -> None:
        super().__init__(width, delta, output_dropout)
        self.delta = delta
        keys, _, values = delta.channels
        self.q_proj = Linear(width, keys, bias=False)
        self.k_proj = Linear(width, keys, bias=False)
        self.v_proj = Linear(width, values, bias=False)
        self.conv = nn.Parameter(torch.empty(sum(delta.channels), delta.conv))
        self.beta_proj = Linear(width, delta.heads, bias=False)
        self.decay_down = None if delta.rank is None else Linear(width, delta.rank, bias=False)
        self.decay_proj = Linear(delta.rank or width, delta.decays, bias=False)
        self.log_rate = nn.Parameter(torch.empty(delta.heads))
        self.decay_bias = nn.Parameter(torch.ones(delta.decays))
        self.gate_down = None if delta.rank is None else Linear(width, delta.rank, bias=False)
        self.gate_proj = Linear(delta.rank or width, values, bias=False)
        self.norm = RMSNorm(delta.value_size, norm_eps)
        self.o_proj = Linear(values, width, bias=False)
        self.initialize_()

    def initialize_(self, generator: torch.Generator | None = None) -> None:
        """The convolution uniform within W^-0.5, rates uniform in [0.01, 16], the decays' biases and the gains 1, as in
        transformers' Qwen3-Next."""
        wide = self.delta.conv**-0.5
        with torch.no_grad():
            self.conv.copy_(drawn(self.conv.shape, -wide, wide, generator))
            self.log_rate.copy_(drawn(self.log_rate.shape, 0.01, 16, generator).log_())
            nn.init.ones_(self.decay_bias)
            assert self.norm.weight is not None
            nn.init.ones_(self.norm.weight)

    def state(self, dtype: torch.dtype) -> StateSpec:
        """The two of `DeltaPast`, in float32 or float64."""
        delta, kept = self.delta, state_dtype(dtype)
        shapes = (delta.heads, delta.head_dim, delta.value_size), (delta.conv - 1, sum(delta.channels))
        return StateSpec(delta, tuple((shape, kept) for shape in shapes))

    def inputs(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values side by side, and what betas, decays and gates are made of."""
        first = [self.q_proj, self.k_proj, self.v_proj, self.beta_proj]
        if self.decay_down is None or self.gate_down is None:
            *qkv, beta, decay, gate = products(x, [*first, self.decay_proj, self.gate_proj])
        else:
            *qkv, beta, low, lower = products(x, [*first, self.decay_down, self.gate_down])
            decay, gate = self.decay_proj(low), self.gate_proj(lower)
        return [torch.cat(qkv, -1), beta, decay, gate]

    def mix(
        self, inputs: Sequence[Tensor], order: InOrder, past: Sequence[Tensor] | None
    ) -> tuple[Tensor, DeltaPast]:
        """The gated norm of what is read, [B, T, H E]."""
        mixed, beta, decay, gate = inputs
        mixed = order.known(mixed)
        log_decay = self._log_decay(decay)
        state, tail = (None, None) if past is None else (past[0].to(log_decay.dtype), past[1].to(mixed.dtype))
        seen = gated(short_convolution(mixed, self.conv, begins=order.begins, past=tail), None, "silu")
        size = self.delta.head_dim, self.delta.head_dim, self.delta.value_size
        parts = zip(seen.split(self.delta.channels, -1), size, strict=True)
        q, k, v = (t.unflatten(2, (-1, d)).transpose(1, 2) for t, d in parts)
        rule = delta_attend(
            q, k, v, log_decay, beta.sigmoid().transpose(1, 2),
            tokens=order.tokens, past=state, unit_eps=UNIT_EPS,
        )  # fmt: skip
        out = self.norm(rule.out.transpose(1, 2)).flatten(2)
        out = gated(gate, out, "silu") if self.delta.gate == "silu" else out * gate.sigmoid()
        return out, DeltaPast(rule.state, order.tail(mixed, tail, self.delta.conv - 1))

    def _log_decay(self, raw: Tensor) -> Tensor:
        """[B, H, T] or [B, H, T, D], float32 or float64."""
        work = torch.float64 if raw.dtype == torch.float64 else torch.float32
        rate = F.softplus(raw.to(work) + self.decay_bias.to(work))
        by_head = rate.unflatten(2, (self.delta.heads, -1)).transpose(1, 2)
        log_decay: Tensor = -self.log_rate.to(work).exp().view(-1, 1, 1) * by_head
        return log_decay if self.delta.decay == "channel" else log_decay.squeeze(-1)
