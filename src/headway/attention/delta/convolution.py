"""Short causal convolutions, channel by channel, within documents.

Legend: B rows, T slots, C channels, W tokens in the window.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.errors import PatternError
from headway.native import convolution as native


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    begins: Tensor | None = None,
    past: Tensor | None = None,
    act: Literal["none", "silu"] = "none",
) -> Tensor:
    """Returns y_t = act(sum over w < W of weight[:, W - 1 - w] x_(t - w) + bias), channel by channel, within the
    document of t: [B, T, C].

    Args:
        x: [B, T, C], slots in the order of their tokens;  weight: [C, W];  bias: [C].
        begins: bool [B|1, T], True where a slot begins another document than that of the slot before; nowhere if None.
        past: [B, W - 1, C], the inputs before the first slot, by default 0.
        act: the activation on the sums, which are first rounded to the dtype of x.

    Raises PatternError if shapes do not fit together. (Gu and Dao 2023, section 3.4; Yang et al. 2024.)
    """
    (batch, count, channels), before = x.shape, weight.shape[1] - 1
    if weight.shape[0] != channels or (past is not None and tuple(past.shape) != (batch, before, channels)):
        raise PatternError(
            f"short_convolution: x {[*x.shape]} needs a weight of [{channels}, W] and a past of [{batch}, W - 1, "
            f"{channels}]; got {[*weight.shape]}" + ("" if past is None else f" and {[*past.shape]}")
        )
    if not count:
        return x
    if native.takes(x, weight, past):
        y: Tensor = _Native.apply(x, weight, bias, past, begins, act)  # type: ignore[no-untyped-call]
        return y
    return _plain(x, weight, bias, past, begins, act)


class Convolved(NamedTuple):
    """The arguments of `short_convolution` with silu, whose result is recomputed when needed, split into heads."""

    heads: int
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    begins: Tensor | None
    past: Tensor | None

    def by_head(self) -> Tensor:
        """Computes the convolution, split into heads: [B, heads, T, C / heads]."""
        x, weight, bias, begins, past = self[1:]
        y = short_convolution(x, weight, bias, begins=begins, past=past, act="silu")
        heads: Tensor = y.unflatten(2, (self.heads, -1))
        return heads.transpose(1, 2)


def _plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor | None, begins: Tensor | None, act: str
) -> Tensor:
    """Computes `short_convolution` in torch's operations."""
    (batch, count, channels), before = x.shape, weight.shape[1] - 1
    past = x.new_zeros(batch, before, channels) if past is None else past
    if begins is None:
        y = _convolved(torch.cat((past, x), 1), weight, bias)
    else:  # W - 1 zeros before each document: W = 2 and documents a b | c give past a b 0 c, read back at a, b and c
        rank = begins.cumsum(1)
        place = (torch.arange(count, device=x.device) + before * (rank + 1)).expand(batch, -1).unsqueeze(-1)
        room = count + before * (int(rank.max()) + 1)
        spread = torch.cat((past, x.new_zeros(batch, room - before, channels)), 1)
        spread = spread.scatter(1, place.expand(-1, -1, channels), x)
        y = _convolved(spread, weight, bias).gather(1, (place - before).expand(-1, -1, channels))
    return F.silu(y) if act == "silu" else y


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.conv1d(x.mT, weight.unsqueeze(1), bias, groups=weight.shape[0]).mT


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        past: Tensor | None,
        begins: Tensor | None,
        act: str,
    ) -> Tensor:
        ctx.act = act
        ctx.save_for_backward(x, weight, bias, past, begins)
        return native.forward(x, weight, bias, past, begins, act)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, past, begins = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return *native.backward(grads[0], x, weight, bias, past, begins, ctx.act), None, None
        inputs = x, weight, bias, past
        leaves = [t for t in inputs if t is not None and t.requires_grad]
        y = _plain(x, weight, bias, past, begins, ctx.act)
        grads_x = iter(torch.autograd.grad(y, leaves, grads[0], create_graph=True))
        return *(next(grads_x) if t is not None and t.requires_grad else None for t in inputs), None, None
