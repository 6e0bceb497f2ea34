"""Normalisation over the features of one token.

Legend: M width of the model.
"""

from typing import get_args

import torch
from torch import Tensor, nn

from headway.nn.fused import Norm, add_norm, normed

LayerNorm = nn.LayerNorm
NORMS: tuple[str, ...] = get_args(Norm)


def make_norm(kind: Norm, width: int, eps: float, bias: bool) -> nn.Module:
    """`RMSNorm` ("rms") or `LayerNorm` ("layer": minus the mean, over the standard deviation, Ba et al. 2016)."""
    if kind == "rms":
        return RMSNorm(width, eps, bias)
    return LayerNorm(width, eps, bias=bias)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * g (+ b), over the last axis. (Zhang and Sennrich 2019, equation 4.)

    Computed in float32 (float64 for float64 inputs) and cast back before the gain is applied, as the LLaMA code of
    `transformers` does: `headway.nn.fused.normed`. Invariant to rescaling of x (up to eps), not to re-centring.

    Args:
        width: M, the size of the last axis.
        eps: added to the mean square.
        bias: adds a trained b, which LLaMA does not have.
    """

    def __init__(self, width: int, eps: float = 1e-6, bias: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., M] -> [..., M], in the promoted dtype of x and the gain."""
        return normed("rms", x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}{'' if self.bias is None else ', bias=True'}"


def normed_sum(norm: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """norm(x + y), and x + y: in one pass where `norm` is one of the above and has no hooks."""
    if type(norm) in (RMSNorm, LayerNorm) and not (norm._forward_hooks or norm._forward_pre_hooks):
        assert isinstance(norm, RMSNorm | LayerNorm)
        kind: Norm = "rms" if isinstance(norm, RMSNorm) else "layer"
        return add_norm(kind, x, y, norm.weight, norm.bias, norm.eps)
    total = x + y
    return norm(total), total
