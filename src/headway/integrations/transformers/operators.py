"""What the replaced modules compute, in the arithmetic of those of `transformers`: its dtypes between the steps, its
rounding.

Legend: M width, D per head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * g, rounded to the dtype of x before the gain (LLaMA). [..., M] -> [..., M]."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return gain * wide.to(x.dtype)


def rms_norm_from_one(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (1 + g), rounded once (Gemma). [..., M] -> [..., M]."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + gain.float())).type_as(x)


def gated(gate: Tensor, up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """act(gate) * up."""
    return act(gate) * up
