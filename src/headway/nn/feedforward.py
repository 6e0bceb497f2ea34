"""The feed-forward network, which transforms each token separately.

Legend: M width of the model, F width of the hidden layer.
"""

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from headway.errors import check_known
from headway.native import rows
from headway.nn.fused import ACTIVATIONS, gated
from headway.nn.linear import Linear, products
from headway.nn.scale import scaled
from headway.nn.share import dropped
from headway.nn.weights.base import needs_gradient

CHUNK = 512
"""Most tokens whose hidden layers are computed at a time if they are not kept for a backward: they then stay in the
CPU's cache, and in memory that is already mapped (`docs/log.md`)."""


def swish(x: Tensor, beta: float = 1.0) -> Tensor:
    """Returns x * sigmoid(beta * x): x / 2 at beta = 0, SiLU at 1, towards ReLU for large beta. (Ramachandran et al.
    2017.)"""
    return x * torch.sigmoid(beta * x)


class XIELU(nn.Module):
    """The activation p x^2 + x / 2 above 0, and n (e^min(x, -1e-6) - 1 - x) + x / 2 elsewhere, with trained p =
    softplus(alpha_p) and n = 1/2 + softplus(alpha_n), both initially 0.8. (Huang and Schlag 2024, "Deriving
    Activation Functions Using Integration", section 3.)"""

    start: Mapping[str, float] = {"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3))}

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = (nn.Parameter(torch.full((1,), value)) for value in self.start.values())

    def forward(self, x: Tensor) -> Tensor:
        """Applies the activation: [..., F] -> [..., F]."""
        above = softplus(self.alpha_p) * x * x
        below = (0.5 + softplus(self.alpha_n)) * (torch.expm1(x.clamp(max=-1e-6)) - x)
        return torch.where(x > 0, above, below) + 0.5 * x


TRAINED: Mapping[str, type[XIELU]] = {"xielu": XIELU}
"""Activations that have parameters, by the names that Hugging Face configs use."""


def named_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Returns the activation of that name. Raises ConfigError for a name that is not in `ACTIVATIONS`."""
    check_known(name, ACTIVATIONS, "there is no activation")
    return ACTIVATIONS[name]


class FeedForward(nn.Module):
    """The feed-forward down(act(up(x))): the two layers of Vaswani et al. 2017, section 3.3.
    Parameters 2 * M * F (+ F + M).

    With `gated`, down(act(gate(x)) * up(x)): SwiGLU if act is SiLU (Shazeer 2020). Parameters 3 * M * F (+ 2 F + M).

    `activation`: a name in `ACTIVATIONS` or `TRAINED`, by default "relu", or "silu" with a gate. `dropout`:
    probability for the input of down, in training. `scales`: factors on the outputs of down and gate (Falcon-H1).
    `sparsity`: the share of hidden units that would be 0 if gates were normally distributed: act is given relu(g -
    mean(g) - z std(g)) for the F gates g of a token, with z the normal quantile of that share (Gemma 3n); 0 leaves
    the gates unchanged."""

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: str | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        gated: bool = False,
        scales: tuple[float, float] = (1.0, 1.0),
        sparsity: float = 0.0,
    ) -> None:
        super().__init__()
        self.sparsity = sparsity
        self.scale, self.gate_scale = scales
        self.drop = nn.Dropout(dropout)
        self.act = activation or ("silu" if gated else "relu")
        check_known(self.act, {**ACTIVATIONS, **TRAINED}, "there is no activation")
        self.act_fn = TRAINED[self.act]() if self.act in TRAINED else None
        self.gate_proj = Linear(width, hidden, bias=bias) if gated else None
        self.up_proj = Linear(width, hidden, bias=bias)
        self.down_proj = Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transforms each token: [..., M] -> [..., M]."""
        if x.numel() <= CHUNK * x.shape[-1] or self._keeps(x):
            return self._transform(x)
        chunks = x.reshape(-1, x.shape[-1]).split(CHUNK)
        return torch.cat([self._transform(chunk) for chunk in chunks]).view(*x.shape[:-1], -1)

    def _keeps(self, x: Tensor) -> bool:
        """Returns whether all hidden layers are computed at once: for a backward, without the native kernels, and
        for weights that each product unpacks, so that they are unpacked only once."""
        if self.training or self.down_proj.kept.unpacks or not rows.runs(x):
            return True
        return needs_gradient(x, *self.parameters())

    def _transform(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj, self.up_proj
        first, *second = [up(x)] if gate is None else products(x, (gate, up))
        first = _largest(scaled(first, self.gate_scale), self.sparsity)
        if self.act_fn is None:
            x = gated(first, second[0] if second else None, self.act)
        else:
            x = self.act_fn(first) * second[0] if second else self.act_fn(first)
        x = dropped(x, self.drop.p, self.down_proj.share) if self.training else x
        return scaled(self.down_proj(x), self.scale)


def _largest(gates: Tensor, sparsity: float) -> Tensor:
    """Returns relu(gates - mean - z std), with Phi(z) = sparsity; the gates themselves if sparsity is 0."""
    if not sparsity:
        return gates
    std, mean = torch.std_mean(gates, -1, unbiased=False, keepdim=True)
    return torch.relu(gates - (mean + std * NormalDist().inv_cdf(sparsity)))
