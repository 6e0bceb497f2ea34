"""The layer of the gated delta rule: short convolutions, gates, the rule, and a gated norm.

Legend: B rows, T tokens, M width, K key heads, H value heads, D per key, E per value, W tokens of a convolution, C
channels of queries, keys and values.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.attention.delta import DeltaSpec, delta_attend, short_convolution
from headway.errors import ConfigError
from headway.nn.fused import gated
from headway.nn.linear import Linear, products
from headway.nn.norms import RMSNorm
from headway.tokens import Tokens, take_slots

UNIT_EPS = 1e-6
"""Added to the squared length of queries and keys, as in flash-linear-attention and transformers."""


class DeltaPast(NamedTuple):
    """All that the layer keeps of earlier tokens of each row: the state [B, H, D, E], float32 or float64, and what the
    convolution saw last [B, W - 1, C]."""

    state: Tensor
    tail: Tensor


class GatedDelta(nn.Module):
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

    (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", figure 1; Kimi Linear, 2025, section 4.)
    """

    def __init__(self, width: int, delta: DeltaSpec, *, norm_eps: float = 1e-6) -> None:
        super().__init__()
        self.width, self.delta = width, delta
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
        nn.init.uniform_(self.conv, -(delta.conv**-0.5), delta.conv**-0.5)
        with torch.no_grad():
            self.log_rate.uniform_(0.01, 16).log_()

    def forward(self, x_BTM: Tensor, *, tokens: Tokens | None = None) -> Tensor:
        """[B, T, M] -> [B, T, M] of whole rows; `tokens` are numbered from 0 unless given. Documents know nothing of
        one another, and empty slots give 0."""
        return self.after(x_BTM, None, tokens=tokens)[0]

    def after(
        self, x_BTM: Tensor, past: DeltaPast | None, *, tokens: Tokens | None = None
    ) -> tuple[Tensor, DeltaPast]:
        """The same of rows that go on behind `past` (one document per row), and the past of the tokens to come.

        However a row is cut, the results are those of the whole row. Raises ConfigError for another width, and for
        packed documents behind a past."""
        if x_BTM.dim() != 3 or x_BTM.shape[2] != self.width:
            raise ConfigError(f"GatedDelta: x must be [batch, tokens, {self.width}], got {[*x_BTM.shape]}")
        order = _in_order(tokens, x_BTM)
        x = x_BTM if order.slots is None else take_slots(x_BTM, order.slots, 1)
        if order.begins is not None and past is not None:
            raise ConfigError(
                "GatedDelta: a past is of one document per row, but these tokens are of several (packed); give each "
                "document a row of its own"
            )
        *qkv, beta, decay, gate = self._projected(x)
        mixed = torch.cat(qkv, -1)
        if order.valid is not None:
            mixed = mixed.masked_fill(~order.valid.unsqueeze(-1), 0.0)
        tail = None if past is None else past.tail
        seen = gated(short_convolution(mixed, self.conv, begins=order.begins, past=tail), None, "silu")
        size = self.delta.head_dim, self.delta.head_dim, self.delta.value_size
        parts = zip(seen.split(self.delta.channels, -1), size, strict=True)
        q, k, v = (t.unflatten(2, (-1, d)).transpose(1, 2) for t, d in parts)
        rule = delta_attend(
            q, k, v, self._log_decay(decay), beta.sigmoid().transpose(1, 2),
            tokens=order.tokens, past=None if past is None else past.state, unit_eps=UNIT_EPS,
        )  # fmt: skip
        out = self.norm(rule.out.transpose(1, 2)).flatten(2)
        out = gated(gate, out, "silu") if self.delta.gate == "silu" else out * gate.sigmoid()
        y: Tensor = self.o_proj(out)
        if order.slots is not None:
            y = take_slots(y, order.slots.argsort(1), 1)
        return y, DeltaPast(rule.state, self._tail(mixed, tail, order))

    def _projected(self, x: Tensor) -> list[Tensor]:
        """Queries, keys, values, and what betas, decays and gates are made of."""
        first = [self.q_proj, self.k_proj, self.v_proj, self.beta_proj]
        if self.decay_down is None or self.gate_down is None:
            return products(x, [*first, self.decay_proj, self.gate_proj])
        *some, decay, gate = products(x, [*first, self.decay_down, self.gate_down])
        return [*some, self.decay_proj(decay), self.gate_proj(gate)]

    def _log_decay(self, raw: Tensor) -> Tensor:
        """[B, H, T] or [B, H, T, D], float32 or float64."""
        work = torch.float64 if raw.dtype == torch.float64 else torch.float32
        rate = F.softplus(raw.to(work) + self.decay_bias.to(work))
        by_head = rate.unflatten(2, (self.delta.heads, -1)).transpose(1, 2)
        log_decay: Tensor = -self.log_rate.to(work).exp().view(-1, 1, 1) * by_head
        return log_decay if self.delta.decay == "channel" else log_decay.squeeze(-1)

    def _tail(self, mixed: Tensor, tail: Tensor | None, order: "_InOrder") -> Tensor:
        """What the convolution of the next tokens sees: the last W - 1 of each row, zeros where there are fewer."""
        before, (rows, count, channels) = self.delta.conv - 1, mixed.shape
        tail = mixed.new_zeros(rows, before, channels) if tail is None else tail
        every = torch.cat((tail, mixed), 1)
        if order.valid is None:
            return every[:, count:].contiguous()
        at = order.valid.sum(1, keepdim=True) + torch.arange(before, device=mixed.device)
        return every.gather(1, at.expand(rows, -1).unsqueeze(-1).expand(-1, -1, channels))


class _InOrder(NamedTuple):
    """Slots by document and index, empty ones last.

    slots: [B|1, T], which slot comes first, second, ...; None where they lie so.   tokens: in this order.
    valid: bool [B|1, T], in this order; None where all are.   begins: as in `short_convolution`.
    """

    slots: Tensor | None
    tokens: Tokens
    valid: Tensor | None
    begins: Tensor | None


def _in_order(tokens: Tokens | None, x: Tensor) -> _InOrder:
    if tokens is None:
        tokens = Tokens.range(x.shape[1], device=x.device)
    if tokens.count != x.shape[1] or tokens.rows not in (1, len(x)):
        raise ConfigError(
            f"GatedDelta: tokens describe {tokens.rows} rows of {tokens.count} slots, x holds {len(x)} rows of "
            f"{x.shape[1]}"
        )
    if tokens.count == 0 or (tokens.start is not None and tokens.document is None):
        return _InOrder(None, tokens, None, None)
    valid, last = tokens.valid, torch.iinfo(torch.int64).max
    place = torch.where(valid, tokens.documents * (tokens.index.max() + 1) + tokens.index, last)
    slots = None
    if bool((place[:, 1:] < place[:, :-1]).any()):
        slots = place.argsort(dim=1, stable=True)
        tokens = tokens.gather(slots)
        valid = tokens.valid
    document = tokens.documents
    begins = F.pad((document[:, 1:] != document[:, :-1]) & valid[:, 1:], (1, 0))
    return _InOrder(
        slots, tokens, None if bool(valid.all()) else valid, begins if bool(begins.any()) else None
    )
