"""Short convolutions of rows on the native kernels, forward and backward.

`headway.attention.delta.convolution` has the formula, and the path without kernels.
"""

import torch
from torch import Tensor

from headway.native import interface as c
from headway.native.loader import threads
from headway.native.rows import addresses, run, runs


def takes(x: Tensor, weight: Tensor, past: Tensor | None) -> bool:
    """Returns whether the kernels take x [B, T, C], weight [C, W] and past."""
    return runs(x, past) and runs(weight) and weight.shape[1] <= c.MOST_WINDOW


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor | None, begins: Tensor | None, act: str
) -> Tensor:
    """Returns y [B, T, C] of x, weight [C, W], bias [C], past [B, W - 1, C], begins, bool [B|1, T], and act "none" or
    "silu"."""
    struct = _struct(x, weight, bias, past, begins, act)
    y = x.new_empty(x.shape)
    struct.y = y.data_ptr()
    run("headway_convolve_rows", struct)
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    past: Tensor | None,
    begins: Tensor | None,
    act: str,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of x, weight, bias and past."""
    struct = _struct(x, weight, bias, past, begins, act)
    dy, dx = dy.contiguous(), x.new_empty(x.shape)
    d_weight = x.new_empty(weight.shape[::-1], dtype=torch.float32)
    d_bias = None if bias is None else x.new_empty(bias.shape, dtype=torch.float32)
    d_past = None if past is None else torch.zeros_like(past, memory_format=torch.contiguous_format)
    struct.dy, struct.dx, struct.d_past, struct.d_weight, struct.d_bias = addresses(
        dy, dx, d_past, d_weight, d_bias
    )
    run("headway_convolve_rows", struct)
    return (
        dx,
        d_weight.flip(0).t().to(weight.dtype),
        d_bias if bias is None or d_bias is None else d_bias.to(bias.dtype),
        d_past,
    )


def _struct(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor | None, begins: Tensor | None, act: str
) -> c.ConvolutionStruct:
    batch, slots, channels = x.shape
    x = x if x.stride(2) == 1 or channels == 1 else x.contiguous()
    taps = weight.detach().float().t().flip(0).contiguous()  # tap 0 multiplies x_t itself
    bias = None if bias is None else bias.detach().float().contiguous()
    past, begins = (None if t is None else t.contiguous() for t in (past, begins))
    struct = c.ConvolutionStruct(
        threads(), batch, slots, channels, weight.shape[1], c.TYPES[x.dtype], c.ACTIVATIONS[act],
        x.data_ptr(), x.stride(0), x.stride(1), *addresses(taps, bias, begins),
        begins.stride(0) if begins is not None and len(begins) > 1 else 0, *addresses(past),
    )  # fmt: skip
    struct.kept = x, taps, bias, past, begins  # keeps the tensors alive that the struct points to
    return struct
