"""What is done to each token alone: attention gathers, the feed-forward transforms.

Legend: M width of the model, F width of the hidden layer.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from headway.errors import check_known
from headway.native import rows
from headway.nn.fused import ACTIVATIONS, gated
from headway.nn.linear import Linear, products
from headway.nn.share import dropped
from headway.nn.weights.base import needs_gradient

CHUNK = 512
"""Tokens whose hidden layers are computed at a time where nothing is kept of them: they stay in the CPU's cache, and in
memory that is there already (`docs/log.md`)."""


def swish(x: Tensor, beta: float = 1.0) -> Tensor:
    """x * sigmoid(beta * x): x / 2 at beta = 0, SiLU at 1, towards ReLU for large beta. (Ramachandran et al.
    2017.)"""
    return x * torch.sigmoid(beta * x)


def named_activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of that name. Raises ConfigError for a name that is not in `ACTIVATIONS`."""
    check_known(name, ACTIVATIONS, "there is no activation")
    return ACTIVATIONS[name]


class FeedForward(nn.Module):
    """down(act(up(x))): the two layers of Vaswani et al. 2017, section 3.3. Parameters 2 * M * F (+ F + M).

    With `gated`, down(act(gate(x)) * up(x)): SwiGLU where act is SiLU (Shazeer 2020). Parameters 3 * M * F (+ 2 F + M).

    `activation`: a name in `ACTIVATIONS`, "relu" unless given, "silu" with a gate. `dropout`: probability for what down
    is given, in training."""

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: str | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.act = activation or ("silu" if gated else "relu")
        named_activation(self.act)
        self.gate_proj = Linear(width, hidden, bias=bias) if gated else None
        self.up_proj = Linear(width, hidden, bias=bias)
        self.down_proj = Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., M] -> [..., M]."""
        if x.numel() <= CHUNK * x.shape[-1] or self._keeps(x):
            return self._transform(x)
        chunks = x.reshape(-1, x.shape[-1]).split(CHUNK)
        return torch.cat([self._transform(chunk) for chunk in chunks]).view(*x.shape[:-1], -1)

    def _keeps(self, x: Tensor) -> bool:
        """Whether all hidden layers are wanted at once: for the backward, by who does not run the native kernels, and
        by weights that are unpacked, so that they are once."""
        if self.training or self.down_proj.kept.unpacks or not rows.runs(x):
            return True
        return needs_gradient(x, *self.parameters())

    def _transform(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj, self.up_proj
        first, *second = [up(x)] if gate is None else products(x, (gate, up))
        x = gated(first, second[0] if second else None, self.act)
        x = dropped(x, self.drop.p, self.down_proj.share) if self.training else x
        y: Tensor = self.down_proj(x)
        return y
