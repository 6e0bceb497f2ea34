"""Attention by its formula, in the dtype of its inputs: the low-precision reference, and the float64 truth."""

import torch
from torch import Tensor

from headway.patterns import Pattern, visible
from headway.tokens import Tokens


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    q_tokens: Tokens,
    k_tokens: Tokens,
    scale: float | None = None,
) -> Tensor:
    """Returns softmax(scale q k^T + mask) v with keys repeated for grouped heads; rows that see nothing are 0."""
    return by_mask(q, k, v, visible(pattern, q_tokens, k_tokens), scale)


def by_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Returns what `naive` does for a boolean mask (True: the pair may be seen)."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)
    return torch.where(mask.any(-1, keepdim=True), weights.masked_fill(~mask, 0.0), 0.0) @ v


def with_gradients(f, grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    """Returns (output, gradients...) of f at `tensors`, detached, for the incoming gradient `grad`."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = f(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))
