"""What the replaced modules compute: `headway.nn.fused`, in the arithmetic of those of `transformers`.

Legend: M width, B rows, H heads, T tokens, D per head, d <= D rotated numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headway.nn import fused

NAMES: Mapping[str, str] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_pytorch_tanh",
    "ReLU": "relu",
}
"""Activations by their classes in transformers and torch."""


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * g, rounded to the dtype of x before the gain (LLaMA). [..., M] -> [..., M]."""
    return fused.normed("rms", x, gain, None, eps)


def rms_norm_from_one(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (1 + g), rounded once (Gemma). [..., M] -> [..., M]."""
    return fused.normed("rms", x.float(), 1.0 + gain.float(), None, eps).type_as(x)


def gated(gate: Tensor, up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """act(gate) * up."""
    name = NAMES.get(type(act).__name__)
    return act(gate) * up if name is None else fused.gated(gate, up, name)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """x cos + (-x2, x1) sin on the first d numbers (x1, x2) of each head of q and k [B, H, T, D]; cos and sin
    [B or 1, T, d], without gradient."""
    assert unsqueeze_dim == 1, unsqueeze_dim
    first, second = sin.chunk(2, -1)
    turned = fused.rotate((q, k), cos, torch.cat((-first, second), -1), "halves")
    return turned[0], turned[1]
