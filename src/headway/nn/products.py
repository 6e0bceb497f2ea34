"""Products with weights, in float32 where torch's own library is slow, in bf16 where the CPU has no instruction for
them, and without compiling a kernel for each number of rows.

MKL takes a slow path on CPUs that are not Intel's: on a Zen 4 with two cores, in products for the gradient of a layer's
inputs, it reaches 150 to 178 GFLOP/s and oneDNN 165 to 207; in the forward, 123 to 161 and 146 to 186. For the gradient
of the weights MKL is the faster one. For bf16 torch calls oneDNN, which needs AVX-512; without it torch emulates these
products: 31 GFLOP/s in the forward, 2 for the gradient of the inputs and 18 for that of the weights, where float32
reaches 190 to 205 at AVX2. In this case both factors are widened to float32, and the product is rounded once.

oneDNN compiles kernels for each number of rows that it meets, and keeps them forever, whatever
ONEDNN_PRIMITIVE_CACHE_CAPACITY says: 64 to 466 rows with three small weights take 435 MB in float32. If row counts vary
freely, as in a server, rows are padded to one of a few counts; the rows of a product have the same bits whatever the
other rows are.

Legend: R rows, I inputs, O outputs.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.native.rows import visible
from headway.processor import cpu_vendor

FEW = 64
"""Number of rows below which torch's own path is always taken."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x W^T (+ b), with x [..., I] and W [O, I]: `torch.nn.functional.linear`, using the faster library."""
    if not (_faster(x, weight, bias) or _widens(x, weight, bias)):
        few = x.dtype != torch.bfloat16 or x.numel() < FEW * x.shape[-1] or visible(x, weight, bias)
        if few or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return F.linear(x, weight, bias)
        return _filled(x, lambda rows: F.linear(rows, weight, bias))
    y: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


def forward_product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x W^T for x [R, I] and W [O, I]; records nothing for a gradient."""
    return _product(x, weight)


def input_product(dy: Tensor, weight: Tensor) -> Tensor:
    """Returns dy W for dy [R, O] and W [O, I], the gradient of x; records nothing for a gradient."""
    return _product(dy, weight.T)


def weight_product(dy: Tensor, x: Tensor) -> Tensor:
    """Returns dy^T x for dy [R, O] and x [R, I], the gradient of W; records nothing for a gradient."""
    return (dy.float().T @ x.float()).to(dy.dtype) if _widens(dy, x) else dy.T @ x


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if _widens(x, weight, bias):
        wide = None if bias is None else bias.float()
        return _product(x.float(), weight.float(), wide).to(x.dtype)
    return _onednn(x, weight, bias) if _faster(x, weight, bias) else F.linear(x, weight, bias)


def _faster(x: Tensor, *others: Tensor | None) -> bool:
    return _many(torch.float32, x, *others) and _slow_mkl()


def _widens(x: Tensor, *others: Tensor | None) -> bool:
    return _many(torch.bfloat16, x, *others) and _emulates_bf16()


def _many(dtype: torch.dtype, x: Tensor, *others: Tensor | None) -> bool:
    """Returns whether these are the operands of a product of at least `FEW` rows on the CPU, all in this dtype,
    without autocast and not under a transform."""
    return (
        x.dtype == dtype
        and x.device.type == "cpu"
        and x.numel() >= FEW * x.shape[-1]
        and all(t is None or t.dtype == dtype for t in others)
        and not visible(x, *others)
        and not torch.is_autocast_enabled("cpu")
    )


@cache
def _emulates_bf16() -> bool:
    # a torch without oneDNN lacks this operator, and has products of its own
    return torch.backends.mkldnn.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


@cache
def _slow_mkl() -> bool:
    return (
        cpu_vendor() == "AuthenticAMD"
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
    )


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _filled(
        x.contiguous(), lambda rows: torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    )


def of_few_counts(layer: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Returns layer(rows) for rows [R, I] padded by `added_rows`, also in training: an expert has another R in each
    step."""
    return _filled(rows, layer) if added_rows(rows) else layer(rows)


def added_rows(rows: Tensor) -> int:
    """Returns how many rows of zeros pad [R, I] to one of a few R; 0 if no kernel is compiled for each R."""
    if rows.dtype == torch.float32 and len(rows) < FEW and not torch.is_autocast_enabled("cpu"):
        return 0  # MKL multiplies these, and compiles nothing
    compiled = fills(rows) or (rows.device.type == "cpu" and torch.is_autocast_enabled("cpu"))
    return filled_rows(len(rows)) - len(rows) if compiled else 0


def fills(like: Tensor) -> bool:
    """Returns whether products of many rows are padded for the dtype and device of `like`."""
    return like.device.type == "cpu" and (
        like.dtype == torch.bfloat16 or (like.dtype == torch.float32 and _slow_mkl())
    )


def filled_rows(rows: int) -> int:
    """Returns the next multiple of 16, from 256 on of 32, from 512 on of 64, ...: 45 values from 64 to 4096.

    300 rows become 320: 300 has 9 bits, and 1 << (9 - 4) is 32."""
    step = max(16, 1 << max(rows.bit_length() - 4, 0))
    return -(-rows // step) * step


def _filled(x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the product of x [..., I], computed with its rows padded with zeros."""
    rows = x.reshape(-1, x.shape[-1])
    padding = filled_rows(len(rows)) - len(rows)
    y = product(F.pad(rows, (0, 0, 0, padding)) if padding else rows)
    return y[: len(rows)].view(*x.shape[:-1], y.shape[-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight) = grads, ctx.saved_tensors
        want_x, want_w, want_b = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dw = None
        if want_x:
            # if this backward is itself differentiated, use operations that have derivatives
            dx = dy @ weight if torch.is_grad_enabled() else input_product(rows, weight).view(x.shape)
        if want_w:
            x_rows = x.reshape(-1, x.shape[-1])
            dw = rows.T @ x_rows if torch.is_grad_enabled() else weight_product(rows, x_rows)
        return dx, dw, rows.sum(0) if want_b else None
