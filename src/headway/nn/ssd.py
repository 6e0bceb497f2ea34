"""The layer of state-space duality: a short convolution, steps, a state that tokens add to, a gate, and a norm.

Legend: B rows, T tokens, M width, K key heads, H value heads, D per key, E per value, W tokens of a convolution, C
channels of values, keys and queries.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.attention.delta import SSDSpec, delta_attend
from headway.cache import state_dtype
from headway.nn.delta import DeltaPast, RuleLayer
from headway.nn.fused import gated, normed
from headway.nn.linear import Linear, products
from headway.nn.mixing import InOrder, drawn
from headway.nn.norms import RMSNorm
from headway.nn.scale import scaled

STEPS = (1e-3, 1e-1)
"""The range of initial steps."""


class SSD(RuleLayer):
    """State-space duality, the layer of Mamba-2.

        v, k, q = silu(conv(x Wm) + b)                                       over W tokens, channel by channel
        step    = max(softplus(x Ws + bias), least_step)                     for each head
        ln a    = - e^rate step
        o       = delta_attend(q, k, v, ln a, step, scale=1, erases=False) + skip v
        y       = norm(o * silu(x Wg)) Wo                  norm: over the values of each key head, with gains of its own

    v, k, q are x, B, C in the paper; skip is D. Parameters: gate_proj [H E, M], mixed_proj [C, M], step_proj [H, M],
    conv [C, W], conv_bias [C], log_rate, step_bias and skip [H], norm [H E], o_proj [M, H E]; projections have biases
    if `ssd.bias`. The outputs of the first three matrices are multiplied by `ssd.factors`; without `ssd.norm` there is
    no norm. There are no positions, because the state depends on the order of tokens.

    Args:
        width: M.
        ssd: sizes, and which biases there are.
        norm_eps: epsilon of the norm.
        output_dropout: probability for the output, in training mode.

    (Dao and Gu 2024, "Transformers are SSMs", sections 5 and 7, figure 6.)
    """

    parts = "vkq"

    def __init__(
        self, width: int, ssd: SSDSpec, *, norm_eps: float = 1e-5, output_dropout: float = 0.0
    ) -> None:
        super().__init__(width, ssd, output_dropout)
        self.sizes = self.ssd = ssd
        values, channels, bias = ssd.channels[2], sum(ssd.channels), ssd.bias
        self.gate_proj = Linear(width, values, bias=bias)
        self.mixed_proj = Linear(width, channels, bias=bias)
        self.step_proj = Linear(width, ssd.heads, bias=bias)
        self.conv = nn.Parameter(torch.empty(channels, ssd.conv))
        self.conv_bias = nn.Parameter(torch.empty(channels)) if ssd.conv_bias else None
        self.log_rate, self.step_bias, self.skip = (nn.Parameter(torch.empty(ssd.heads)) for _ in range(3))
        self.norm = RMSNorm(values, norm_eps) if ssd.norm else None
        self.o_proj = Linear(values, width, bias=bias)
        self.initialize_()

    def initialize_(self, generator: torch.Generator | None = None) -> None:
        """Initializes, in place: the convolution uniform within W^-0.5 and its bias 0, rates uniform in [1, 16],
        steps in [0.001, 0.1] with uniform logarithms, skip and gains 1, as in the authors' code."""
        bound, heads = self.ssd.conv**-0.5, self.skip.shape
        with torch.no_grad():
            self.conv.copy_(drawn(self.conv.shape, -bound, bound, generator))
            self.log_rate.copy_(drawn(heads, 1, 16, generator).log_())
            low, high = map(math.log, STEPS)
            # softplus(step_bias) = step: softplus(b) = ln(1 + e^b), so b = ln(e^step - 1)
            self.step_bias.copy_(drawn(heads, low, high, generator).exp_().expm1_().log_())
            for ones in (self.skip, None if self.norm is None else self.norm.weight):
                if ones is not None:
                    nn.init.ones_(ones)
            if self.conv_bias is not None:
                nn.init.zeros_(self.conv_bias)

    def inputs(self, x: Tensor) -> list[Tensor]:
        """Returns values, keys and queries, concatenated, and the projections for steps and gates."""
        return products(x, [self.mixed_proj, self.step_proj, self.gate_proj])

    def mix(
        self, inputs: Sequence[Tensor], order: InOrder, past: Sequence[Tensor] | None
    ) -> tuple[Tensor, DeltaPast]:
        """Returns the norm of the gated output of the rule, [B, T, H E], and the state after these tokens."""
        mixed, step, gate = inputs
        of_gate, *of_mixed, of_step = self.ssd.factors
        step, gate = scaled(step, of_step), scaled(gate, of_gate)
        sizes, bias = self.ssd.channels[::-1], self.conv_bias  # values, keys, queries
        biases = [None] * 3 if bias is None else bias.split(sizes)
        vkq = [scaled(part, factor) for part, factor in zip(mixed.split(sizes, -1), of_mixed, strict=True)]
        parts = vkq, self.conv.split(sizes), biases
        sources, state, tail = self.convolved(*parts, order, past)
        q, k, v = (source.by_head() for source in sources)
        work = state_dtype(step.dtype)
        steps = F.softplus(step.to(work) + self.step_bias.to(work)).transpose(1, 2)
        steps = steps.clamp_min(self.ssd.least_step) if self.ssd.least_step else steps
        log_decay = -self.log_rate.to(work).exp().unsqueeze(-1) * steps
        rule = delta_attend(
            q, k, v, log_decay, steps,
            tokens=order.tokens, past=state, scale=1.0, erases=False, sources=sources,
        )  # fmt: skip
        out = (rule.out + self.skip.view(-1, 1, 1) * v).transpose(1, 2).flatten(2)
        out = gated(gate, out, "silu")
        if self.norm is not None:
            assert self.norm.weight is not None
            groups = out.unflatten(2, (self.ssd.key_heads, -1))
            out = self.norm.weight * normed("rms", groups, None, None, self.norm.eps).flatten(2)
        return order.known(out), DeltaPast(rule.state, tail)
