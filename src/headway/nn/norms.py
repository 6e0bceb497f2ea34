"""Normalization over the features of one token.

Legend: M width of the model.
"""

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from headway.nn.fused import Norm, add_norm, gated, gated_norm, normed
from headway.nn.share import Share, part_of
from headway.parallel import TensorParallel

NORMS: tuple[str, ...] = get_args(Norm)
QKNorm = Literal["none", "head", "all", "rotated"]
QK_NORMS: tuple[str, ...] = get_args(QKNorm)


class LayerNorm(nn.LayerNorm):
    """Layer normalization, (x - mean(x)) / sqrt(var(x) + eps) * (offset + w) (+ b), over the last axis. (Ba et al.
    2016.)

    Args:
        width, eps, bias, weight: as in `RMSNorm`; without w there is no b, either.
        offset: added to w, in the dtype of w: 1 in Nemotron.
    """

    def __init__(
        self, width: int, eps: float = 1e-5, bias: bool = True, offset: float = 0.0, weight: bool = True
    ) -> None:
        super().__init__(width, eps, weight, bias)
        self.width, self.offset = width, offset
        if offset:
            nn.init.constant_(self.weight, 1.0 - offset)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the norm: [..., M] -> [..., M]."""
        return nn.functional.layer_norm(x, [self.width], self.gain, self.bias, self.eps)

    @property
    def gain(self) -> Tensor | None:
        """The factor of each column; None without a weight."""
        return self.weight + self.offset if self.offset else self.weight


class RMSNorm(nn.Module):
    """RMS normalization, x / sqrt(mean(x^2) + eps) * (offset + w) (+ b), over the last axis. (Zhang and Sennrich 2019,
    equation 4.)

    Computed in float32 (float64 for float64 inputs) and cast back before the gain is applied, as the LLaMA code of
    `transformers` does: `headway.nn.fused.normed`. With an offset it is cast back after the gain, which is float32 at
    least, as in the Gemma code, because 1 + w holds fewer bits of w. Invariant to rescaling of x (up to eps), not to
    re-centring.

    Args:
        width: M, the size of the last axis.
        eps: added to the mean square.
        bias: adds a trained b, which LLaMA does not have.
        offset: added to w, which is initially 1 - offset: 1 in Gemma.
        weight: False omits w (OLMo, nanochat).

    Attributes:
        share: the part of the last axis that this rank has, if ranks share it.
    """

    share: Share | None = None

    def __init__(
        self, width: int, eps: float = 1e-6, bias: bool = False, offset: float = 0.0, weight: bool = True
    ) -> None:
        super().__init__()
        self.width, self.eps, self.offset = width, eps, offset
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset)) if weight else None
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Applies the norm: [..., M] -> [..., M], in the promoted dtype of x and the weight."""
        if self.share is not None:
            return self._shared(x, self.share.tensor)
        gain = self.gain
        if gain is None or self.weight is None or not self.offset:
            return normed("rms", x, gain, self.bias, self.eps)
        bias = None if self.bias is None else self.bias.to(gain.dtype)
        y = normed("rms", x.to(gain.dtype), gain, bias, self.eps)
        return y.to(torch.promote_types(x.dtype, self.weight.dtype))

    @property
    def gain(self) -> Tensor | None:
        """The factor of each column: w, or offset + w in float32 at least; None without a weight."""
        if self.weight is None or not self.offset:
            return self.weight
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + self.offset

    def divide(self, share: Share) -> None:
        """Keeps only a rank's part of the weight, in place; the norm must have no bias."""
        assert self.bias is None
        part = share.part(self.width)
        self.weight = None if self.weight is None else part_of(self.weight, 0, part)
        self.width, self.share = len(part), share

    def _shared(self, x: Tensor, tensor: TensorParallel) -> Tensor:
        """Applies the norm to this rank's part, with the mean square over the parts of all ranks, whose gradient is
        summed over them, too."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = tensor.enter(tensor.leave(wide.pow(2).sum(-1, keepdim=True)))
        wide = wide * torch.rsqrt(squares / (x.shape[-1] * tensor.exchange.ranks) + self.eps)
        gain, weight = self.gain, self.weight
        if gain is None or weight is None:
            return wide.to(x.dtype)
        if self.offset:
            return (wide * gain).to(torch.promote_types(x.dtype, weight.dtype))
        return wide.to(x.dtype) * weight

    def extra_repr(self) -> str:
        bias, offset = (
            "" if self.bias is None else ", bias=True",
            f", offset={self.offset}" if self.offset else "",
        )
        return f"{self.width}, eps={self.eps}{bias}{offset}"


KINDS: Mapping[type[nn.Module], Norm] = {RMSNorm: "rms", LayerNorm: "layer"}
"""The norms that have a kernel of one pass."""


def make_norm(
    kind: Norm, width: int, eps: float, bias: bool, offset: float = 0.0, weight: bool = True
) -> RMSNorm | LayerNorm:
    """Returns an `RMSNorm` ("rms") or a `LayerNorm` ("layer")."""
    if kind == "rms":
        return RMSNorm(width, eps, bias, offset, weight)
    return LayerNorm(width, eps, bias, offset, weight)


def normed_sum(norm: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns norm(x + y) and x + y, in one pass if `norm` is one of `KINDS` and has no hooks."""
    if type(norm) in KINDS and not (norm._forward_hooks or norm._forward_pre_hooks):
        assert isinstance(norm, RMSNorm | LayerNorm)
        gain, kind = norm.gain, KINDS[type(norm)]
        if gain is None or not norm.offset or gain.dtype == x.dtype:  # else: rounded after the gain
            return add_norm(kind, x, y, gain, norm.bias, norm.eps)
    total = x + y
    return norm(total), total


def gated_normed_heads(norm: RMSNorm, x: Tensor, gate: Tensor, act: str) -> Tensor:
    """Returns act(gate) * norm(x), with x by heads [..., H, D], and gate and result [..., H D]. The backward keeps
    only x and gate, unless the norm has hooks."""
    if norm._forward_hooks or norm._forward_pre_hooks:
        return gated(gate, norm(x).flatten(-2), act)
    return gated_norm(gate, x, norm.gain, norm.eps, act)


def split_heads(x: Tensor, size: int, norm: RMSNorm | LayerNorm | None = None) -> Tensor:
    """Splits [B, T, heads * size] into heads [B, heads, T, size], normed: each head separately, or all together if
    the norm is that wide."""
    together = norm is not None and norm.width != size
    x = norm(x) if norm is not None and together else x
    x = x.view(x.shape[0], x.shape[1], x.shape[2] // size, size)
    return (x if norm is None or together else norm(x)).transpose(1, 2)


def normed_heads(x: Tensor, norm: nn.Module | None) -> Tensor:
    """Returns norm(x) of heads [B, H, T, D]; no copy is made if the heads of a token are adjacent in memory."""
    if norm is None:
        return x
    y: Tensor = norm(x.transpose(1, 2)).transpose(1, 2)
    return y
