"""Inputs of the gated delta rule, and every result of it with its gradients."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.attention.delta import delta_attend
from headway.tokens import Tokens


class Inputs(NamedTuple):
    """As in `delta_attend`."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    past: Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        """q, k and v in a dtype, others in what is computed in; fresh leaves."""
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
    """Random ones in float64 that `dtype` holds; decays of e^-strength per slot on average, keys of length 1 or so."""
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
    given: Inputs,
    form: str,
    tokens: Tokens | None = None,
    unit_eps: float | None = 1e-6,
    erases: bool = True,
) -> list[Tensor]:
    """out, the last state, and the gradients of all six inputs for random ones of both."""
    how: dict[str, Any] = {"tokens": tokens, "unit_eps": unit_eps, "erases": erases, "form": form}
    attended = delta_attend(*given[:5], past=given.past, **how)
    noise = torch.Generator().manual_seed(7)
    grads = [
        torch.randn(t.shape, generator=noise, dtype=torch.float64).to(t.dtype).to(t.device) for t in attended
    ]
    return [*attended, *torch.autograd.grad(attended, given, grads)]
