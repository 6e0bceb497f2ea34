"""Normalisation over the features of one token.

Legend: M width of the model.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

LayerNorm = nn.LayerNorm
Norm = Literal["rms", "layer"]
NORMS: tuple[str, ...] = get_args(Norm)


def make_norm(kind: Norm, width: int, eps: float, bias: bool) -> nn.Module:
    """`RMSNorm` ("rms") or `LayerNorm` ("layer": minus the mean, over the standard deviation, Ba et al. 2016)."""
    if kind == "rms":
        return RMSNorm(width, eps, bias)
    return LayerNorm(width, eps, bias=bias)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * g (+ b), over the last axis. (Zhang and Sennrich 2019, equation 4.)

    Computed in float32 (float64 for float64 inputs) and cast back before the gain is applied: bit for bit what
    the LLaMA code of `transformers` does. Invariant to rescaling of x (up to eps), not to re-centring.

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
        one_dtype = x.dtype == self.weight.dtype == torch.float32
        if (
            one_dtype and self.bias is None and not torch.is_grad_enabled()
        ):  # the same numbers in one operation
            return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        y = self.weight * wide.to(x.dtype)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}{'' if self.bias is None else ', bias=True'}"
