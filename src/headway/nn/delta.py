"""The layer of the gated delta rule: short convolutions, gates, the rule, and a gated norm.

Legend: B rows, T tokens, M width, K key heads, H value heads, D per key, E per value, W tokens of a convolution, C
channels of queries, keys and values.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.attention.delta import Convolved, DeltaSpec, RuleSizes, delta_attend
from headway.cache import StateSpec, state_dtype
from headway.nn.linear import Linear, products
from headway.nn.mixing import InOrder, StateLayer, drawn
from headway.nn.norms import RMSNorm, gated_normed_heads
from headway.nn.scale import scaled

UNIT_EPS = 1e-6
"""Added to the squared length of queries and keys, as in flash-linear-attention and transformers."""


class DeltaPast(NamedTuple):
    """The past of each row: the state [B, H, D, E], float32 or float64, and the last inputs [B, W - 1, C] of the
    convolution."""

    state: Tensor
    tail: Tensor


class RuleLayer(StateLayer):
    """A layer whose state is updated by `delta_attend` with queries, keys and values that come from convolutions;
    `parts` is the order in which their inputs are concatenated."""

    sizes: RuleSizes
    parts = "qkv"

    def state(self, dtype: torch.dtype) -> StateSpec:
        """Returns the shapes and dtypes of the two tensors of `DeltaPast`, in float32 or float64."""
        sizes, kept = self.sizes, state_dtype(dtype)
        shapes = (sizes.heads, sizes.head_dim, sizes.value_size), (sizes.conv - 1, sum(sizes.channels))
        return StateSpec(sizes, tuple((shape, kept) for shape in shapes))

    def convolved(
        self,
        mixed: Sequence[Tensor],
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        order: InOrder,
        past: Sequence[Tensor] | None,
    ) -> tuple[list[Convolved], Tensor | None, Tensor]:
        """Prepares silu(conv(x) + bias) for each of `parts`, x [B, T, *]. Returns the convolutions of queries, keys
        and values, to be read by head; the state before these tokens; and the last inputs of the convolutions."""
        mixed, before = [order.known(x) for x in mixed], self.sizes.conv - 1
        state, tails = None, [None] * 3
        if past is not None:
            state = past[0].to(state_dtype(mixed[0].dtype))
            tails = past[1].to(mixed[0].dtype).split([x.shape[2] for x in mixed], -1)
        heads = {"q": self.sizes.key_heads, "k": self.sizes.key_heads, "v": self.sizes.heads}
        convolved = {
            part: Convolved(heads[part], x, weight, bias, order.begins, tail)
            for part, x, weight, bias, tail in zip(self.parts, mixed, weights, biases, tails, strict=True)
        }
        ends = [order.tail(x, tail, before) for x, tail in zip(mixed, tails, strict=True)]
        return [convolved[part] for part in "qkv"], state, torch.cat(ends, -1)


class GatedDelta(RuleLayer):
    """The gated delta rule with short convolutions.

        q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv))       over W tokens, channel by channel
        beta    = sigmoid(x Wb), times `beta_scale`                          for each head
        ln a    = - e^rate softplus(x Wa + bias)                             for each head, or each channel of its keys
        o       = delta_attend(q / |q|, k / |k|, v, ln a, beta)
        y       = (norm(o) * gate(x Wg)) Wo                                  norm: over E, one gain for all heads

    Parameters: q_proj, k_proj [K D, M], v_proj [H E, M], q_conv, k_conv [K D, W], v_conv [H E, W], beta_proj [H, M],
    decay_proj [H or H D, M], log_rate [H], decay_bias [H or H D], gate_proj [H E, M], norm [E], o_proj [M, H E]; with
    `delta.rank` r, decay_proj [H or H D, r] and gate_proj [H E, r] follow decay_down and gate_down [r, M]. Projections
    have no biases. There are no positions, because the state depends on the order of tokens.

    Args:
        width: M.
        delta: sizes and gates.
        norm_eps: epsilon of the norm, unless `delta` has its own.
        output_dropout: probability for the output, in training mode.

    (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", figure 1; Kimi Linear, 2025, section 4.)
    """

    def __init__(
        self, width: int, delta: DeltaSpec, *, norm_eps: float = 1e-6, output_dropout: float = 0.0
    ) -> None:
        super().__init__(width, delta, output_dropout)
        self.sizes = self.delta = delta
        keys, _, values = delta.channels
        self.q_proj = Linear(width, keys, bias=False)
        self.k_proj = Linear(width, keys, bias=False)
        self.v_proj = Linear(width, values, bias=False)
        self.q_conv, self.k_conv, self.v_conv = (
            nn.Parameter(torch.empty(channels, delta.conv)) for channels in delta.channels
        )
        self.beta_proj = Linear(width, delta.heads, bias=False)
        self.decay_down = None if delta.rank is None else Linear(width, delta.rank, bias=False)
        self.decay_proj = Linear(delta.rank or width, delta.decays, bias=False)
        self.log_rate = nn.Parameter(torch.empty(delta.heads))
        self.decay_bias = nn.Parameter(torch.ones(delta.decays))
        self.gate_down = None if delta.rank is None else Linear(width, delta.rank, bias=False)
        self.gate_proj = Linear(delta.rank or width, values, bias=False)
        self.norm = RMSNorm(delta.value_size, norm_eps if delta.norm_eps is None else delta.norm_eps)
        self.o_proj = Linear(values, width, bias=False)
        self.initialize_()

    def initialize_(self, generator: torch.Generator | None = None) -> None:
        """Initializes, in place: convolutions uniform within W^-0.5, rates uniform in [0.01, 16], the biases of
        decays and the gains 1, as in transformers' Qwen3-Next."""
        bound = self.delta.conv**-0.5
        with torch.no_grad():
            for conv in self._convs:
                conv.copy_(drawn(conv.shape, -bound, bound, generator))
            self.log_rate.copy_(drawn(self.log_rate.shape, 0.01, 16, generator).log_())
            nn.init.ones_(self.decay_bias)
            assert self.norm.weight is not None
            nn.init.ones_(self.norm.weight)

    @property
    def _convs(self) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
        return self.q_conv, self.k_conv, self.v_conv

    def inputs(self, x: Tensor) -> list[Tensor]:
        """Returns the projections to queries, keys and values, and those for betas, decays and gates."""
        layers = [self.q_proj, self.k_proj, self.v_proj, self.beta_proj]
        if self.decay_down is None or self.gate_down is None:
            *qkv, beta, decay, gate = products(x, [*layers, self.decay_proj, self.gate_proj])
        else:
            *qkv, beta, low, lower = products(x, [*layers, self.decay_down, self.gate_down])
            decay, gate = self.decay_proj(low), self.gate_proj(lower)
        return [*qkv, beta, decay, gate]

    def mix(
        self, inputs: Sequence[Tensor], order: InOrder, past: Sequence[Tensor] | None
    ) -> tuple[Tensor, DeltaPast]:
        """Returns the gated norm of the rule's output, [B, T, H E], and the state after these tokens."""
        *mixed, beta, decay, gate = inputs
        sources, state, tail = self.convolved(mixed, self._convs, [None] * 3, order, past)
        beta = scaled(beta.sigmoid(), self.delta.beta_scale)
        q, k, v = (source.by_head() for source in sources)
        rule = delta_attend(
            q, k, v, self._log_decay(decay), beta.transpose(1, 2),
            tokens=order.tokens, past=state, unit_eps=UNIT_EPS, sources=sources,
        )  # fmt: skip
        out = gated_normed_heads(self.norm, rule.out.transpose(1, 2), gate, self.delta.gate)
        return out, DeltaPast(rule.state, tail)

    def _log_decay(self, raw: Tensor) -> Tensor:
        """Returns ln a as [B, H, T] or [B, H, T, D], float32 or float64."""
        work = state_dtype(raw.dtype)
        rate = F.softplus(raw.to(work) + self.decay_bias.to(work))
        by_head = rate.unflatten(2, (self.delta.heads, -1)).transpose(1, 2)
        log_decay: Tensor = -self.log_rate.to(work).exp().view(-1, 1, 1) * by_head
        return log_decay if self.delta.decay == "channel" else log_decay.squeeze(-1)
