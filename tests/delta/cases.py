"""Inputs of the gated delta rule, and all its results and gradients."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.attention.delta import delta_attend
from headway.tokens import Tokens


class Inputs(NamedTuple):
    """The tensor arguments of `delta_attend`."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    past: Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        """Returns new leaves: q, k and v in `dtype`, the others in the dtype of the computation."""
        work = torch.float64 if dtype == torch.float64 else torch.float32
        return Inputs(*(t.detach().to(dtype if i < 3 else work).requires_grad_() for i, t in enumerate(self)))


def draw(
    count: int,
    *,
    batch: int = 2,
    key_heads: int = 1,
    heads: int = 2,
    d: int = 4,
    e: int = 3,
    channels: bool = False,
    strength: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """Draws float64 inputs exact in `dtype`: decays of e^-strength per slot on average, keys of length about 1."""
    noise = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    q, k = (d**-0.5 * normal(batch, key_heads, count, d) for _ in range(2))
    v, past = normal(batch, heads, count, e), normal(batch, heads, d, e)
    log_decay = -2 * strength * torch.rand(batch, heads, count, *[d] * channels, generator=noise)
    beta = torch.rand(batch, heads, count, generator=noise)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    low = [t.to(dtype) for t in (q, k, v)] + [t.to(work) for t in (log_decay, beta, past)]
    return Inputs(*(t.double().requires_grad_() for t in low))


def results(
    inputs: Inputs,
    form: str,
    tokens: Tokens | None = None,
    unit_eps: float | None = 1e-6,
    erases: bool = True,
) -> list[Tensor]:
    """Returns out, the last state, and the gradients for all six inputs, with random gradients of out and state."""
    options: dict[str, Any] = {"tokens": tokens, "unit_eps": unit_eps, "erases": erases, "form": form}
    attended = delta_attend(*inputs[:5], past=inputs.past, **options)
    noise = torch.Generator().manual_seed(7)
    grads = [
        torch.randn(t.shape, generator=noise, dtype=torch.float64).to(t.dtype).to(t.device) for t in attended
    ]
    return [*attended, *torch.autograd.grad(attended, inputs, grads)]
