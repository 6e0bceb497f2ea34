"""Normalisation over the features of one token.

Legend: M width of the model.
"""

from typing import get_args

import torch
from torch import Tensor, nn

from headway.nn.fused import Norm, add_norm, normed
from headway.nn.share import Share, part_of
from headway.parallel import TensorParallel

LayerNorm = nn.LayerNorm
NORMS: tuple[str, ...] = get_args(Norm)


def make_norm(kind: Norm, width: int, eps: float, bias: bool, offset: float = 0.0) -> nn.Module:
    """`RMSNorm` ("rms") or `LayerNorm` ("layer": minus the mean, over the standard deviation, Ba et al. 2016), which
    has no offset."""
    if kind == "rms":
        return RMSNorm(width, eps, bias, offset)
    return LayerNorm(width, eps, bias=bias)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + w) (+ b), over the last axis. (Zhang and Sennrich 2019, equation 4.)

    Computed in float32 (float64 for float64 inputs) and cast back before the gain is applied, as the LLaMA code of
    `transformers` does: `headway.nn.fused.normed`. With an offset it is cast back behind the gain, which is float32 at
    least, as in the Gemma code: 1 + w holds fewer bits of w. Invariant to rescaling of x (up to eps), not to
    re-centring.

    Args:
        width: M, the size of the last axis.
        eps: added to the mean square.
        bias: adds a trained b, which LLaMA does not have.
        offset: added to w, which is 1 - offset at first: 1 in Gemma.

    Attributes:
        share: which part of the last axis this rank has, where ranks share it.
    """

    share: Share | None = None

    def __init__(self, width: int, eps: float = 1e-6, bias: bool = False, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., M] -> [..., M], in the promoted dtype of x and the weight."""
        if self.share is not None:
            return self._shared(x, self.share.tensor)
        if not self.offset:
            return normed("rms", x, self.weight, self.bias, self.eps)
        gain, bias = self.gain, None if self.bias is None else self.bias.to(self.gain.dtype)
        y = normed("rms", x.to(gain.dtype), gain, bias, self.eps)
        return y.to(torch.promote_types(x.dtype, self.weight.dtype))

    @property
    def gain(self) -> Tensor:
        """What is multiplied: w, or offset + w in float32 at least."""
        if not self.offset:
            return self.weight
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + self.offset

    def divide(self, share: Share) -> None:
        """Leave a rank's part of the weight, in place: of a norm without a bias."""
        assert self.bias is None
        self.weight = part_of(self.weight, 0, share.part(len(self.weight)))
        self.share = share

    def _shared(self, x: Tensor, tensor: TensorParallel) -> Tensor:
        """The norm of this rank's part: the mean square is that of all ranks' parts, and so is its gradient."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = tensor.enter(tensor.leave(wide.pow(2).sum(-1, keepdim=True)))
        wide = wide * torch.rsqrt(squares / (x.shape[-1] * tensor.exchange.ranks) + self.eps)
        if self.offset:
            return (wide * self.gain).to(torch.promote_types(x.dtype, self.weight.dtype))
        return wide.to(x.dtype) * self.weight

    def extra_repr(self) -> str:
        bias, offset = (
            "" if self.bias is None else ", bias=True",
            f", offset={self.offset}" if self.offset else "",
        )
        return f"{self.weight.shape[0]}, eps={self.eps}{bias}{offset}"


def normed_sum(norm: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """norm(x + y), and x + y: in one pass where `norm` is one of the above and has no hooks."""
    if type(norm) in (RMSNorm, LayerNorm) and not (norm._forward_hooks or norm._forward_pre_hooks):
        assert isinstance(norm, RMSNorm | LayerNorm)
        if isinstance(norm, LayerNorm):
            return add_norm("layer", x, y, norm.weight, norm.bias, norm.eps)
        gain = norm.gain
        if not norm.offset or gain.dtype == x.dtype:  # else it is rounded behind the gain
            return add_norm("rms", x, y, gain, norm.bias, norm.eps)
    total = x + y
    return norm(total), total


def head_norm(kind: str, heads: int, size: int, eps: float, offset: float) -> RMSNorm | None:
    """The norm of queries or keys: of each head ("head"), of all heads together ("all"), or none."""
    return None if kind == "none" else RMSNorm(size if kind == "head" else heads * size, eps, offset=offset)


def split_heads(x: Tensor, size: int, norm: nn.Module | None = None) -> Tensor:
    """[B, T, heads * size] -> [B, heads, T, size], normed: each head, or all together where the norm is so wide."""
    together = isinstance(norm, RMSNorm) and len(norm.weight) != size
    x = norm(x) if norm is not None and together else x
    x = x.view(x.shape[0], x.shape[1], x.shape[2] // size, size)
    return (x if norm is None or together else norm(x)).transpose(1, 2)
