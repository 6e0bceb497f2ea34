"""Norms, gates and rotations in one pass each, forward and backward.

Every function runs the native kernels (`headway.native.rows`) on plain float32 and bf16 CPU tensors of one dtype, and
its formula in torch's operations, `plain_...`, in all other cases: on other devices and dtypes, under torch.compile and
torch.func, and for second derivatives. Statistics and products are in float32; results are rounded where the formula in
torch's operations rounds.

Legend: M width of a row, B rows, H heads, T tokens, D per head, d <= D rotated numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.native import interface, rows
from headway.nn.weights.base import needs_gradient
from headway.partial import work_dtype
from headway.positions import tables

Norm = Literal["rms", "layer"]
LIMIT = 7.0
"""The value at which "clamped_swiglu" clamps gate and up."""
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "clamped_swiglu": lambda x: (x := x.clamp(max=LIMIT)) * torch.sigmoid(1.702 * x),
}
"""Activations by the names that Hugging Face configs use, and "clamped_swiglu", the unnamed one of gpt-oss; "relu2"
is max(x, 0)^2 (So et al. 2021, section 3)."""
UPS: Mapping[str, Callable[[Tensor], Tensor]] = {"clamped_swiglu": lambda up: up.clamp(-LIMIT, LIMIT) + 1}
"""The factors that some activations multiply by instead of up: up + 1 in gpt-oss, with up clamped."""


def normed(kind: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalizes the last axis, [..., M]:

        rms     x / sqrt(mean(x^2) + eps) * weight (+ bias)                 (Zhang and Sennrich 2019, equation 4)
        layer   (x - mean(x)) / sqrt(var(x) + eps) * weight (+ bias)        (Ba et al. 2016)

    In "rms" the factor of the weight is rounded to the dtype of x, and the result has the promoted dtype of x and
    weight."""
    if not (_takes_norm(x, weight, bias) and rows.runs(x, weight, bias)):
        return _plain_norm(kind, x, weight, bias, eps)
    if not needs_gradient(x, weight, bias):
        return rows.norm(kind, x, None, weight, bias, eps).y
    y: Tensor = _Norm.apply(kind, eps, x, None, weight, bias)  # type: ignore[no-untyped-call]
    return y


def add_norm(
    kind: Norm, x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns norm(x + y) and x + y, for tensors of one shape."""
    if not (x.shape == y.shape and _takes_norm(x, weight, bias) and rows.runs(x, y, weight, bias)):
        total = x + y
        return normed(kind, total, weight, bias, eps), total
    if not needs_gradient(x, y, weight, bias):
        result = rows.norm(kind, x, y, weight, bias, eps)
        return result.y, result.sum
    results: tuple[Tensor, Tensor] = _Norm.apply(kind, eps, x, y, weight, bias)  # type: ignore[no-untyped-call]
    return results


def gated(gate: Tensor, up: Tensor | None, act: str) -> Tensor:
    """Returns act(gate) * up, or act(gate) without an up; `act` is a name in `ACTIVATIONS`. The backward keeps only
    gate and up. (Shazeer 2020.)"""
    one_shape = up is not None and up.shape == gate.shape
    alone = up is None and act != "relu"  # ReLU's backward needs only its result
    if act in UPS:
        if rows.visible(gate, up) or not needs_gradient(gate, up):
            return plain_gated(gate, up, act)
    elif act not in interface.ACTIVATIONS or not (one_shape or alone) or not rows.runs(gate, up):
        return plain_gated(gate, up, act)
    elif not needs_gradient(gate, up):
        return rows.gate(act, gate, up)
    y: Tensor = _Gated.apply(act, gate, up)  # type: ignore[no-untyped-call]
    return y


def gated_norm(gate: Tensor, x: Tensor, weight: Tensor | None, eps: float, act: str) -> Tensor:
    """Returns gated(gate, normed("rms", x, weight, None, eps), act), with x by heads [..., H, D] and the gate [...,
    H D]. If the kernels run, the backward keeps only these two."""
    kernels = act in interface.ACTIVATIONS and rows.runs(gate, x, weight) and _takes_norm(x, weight)
    if not (kernels and needs_gradient(gate, x, weight)):
        return gated(gate, normed("rms", x, weight, None, eps).flatten(-2), act)
    y: Tensor = _GatedNorm.apply(act, eps, gate, x, weight)  # type: ignore[no-untyped-call]
    return y


def rotate(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, pairing: str | Tensor) -> list[Tensor]:
    """Applies `headway.positions.tables.rotate` to up to three tensors (queries, keys, values). cos and sin get no
    gradient."""
    if not (rows.runs(*xs) and rows.rotates(xs, cos, sin)):
        return [tables.rotate(x, cos, sin, pairing) for x in xs]
    cos, sin = cos.float(), sin.float()
    if not needs_gradient(*xs):
        return rows.rotate(xs, cos, sin, pairing)
    return list(_Rotate.apply(cos, sin, pairing, False, *xs))  # type: ignore[no-untyped-call]


def plain_rms_norm(x: Tensor, weight: Tensor | None, eps: float, bias: Tensor | None = None) -> Tensor:
    """Computes the RMSNorm in torch's operations, bit for bit as the LLaMA code of `transformers` does."""
    wide = x.to(work_dtype(x.dtype))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = wide.to(x.dtype) if weight is None else weight * wide.to(x.dtype)
    return y if bias is None else y + bias


def plain_gated(gate: Tensor, up: Tensor | None, act: str) -> Tensor:
    """Computes `gated` in torch's operations."""
    y = ACTIVATIONS[act](gate)
    return y if up is None else y * (UPS[act](up) if act in UPS else up)


def _plain_norm(kind: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if kind == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return plain_rms_norm(x, weight, eps, bias)


def _takes_norm(x: Tensor, *vectors: Tensor | None) -> bool:
    """Returns whether weight and bias have one number for each column; torch broadcasts other shapes, or raises."""
    return all(v is None or v.shape == x.shape[-1:] for v in vectors)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kind: Norm,
        eps: float,
        x: Tensor,
        y: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        result = rows.norm(kind, x, y, weight, bias, eps)
        ctx.set_materialize_grads(False)
        ctx.kind, ctx.eps, ctx.adds = kind, eps, y is not None
        ctx.save_for_backward(result.sum, result.mean, result.by, weight, bias)
        return (result.y, result.sum) if ctx.adds else result.y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, d_sum: Tensor | None = None) -> tuple[Any, ...]:
        x, mean, by, weight, bias = ctx.saved_tensors
        want_w, want_b = ctx.needs_input_grad[4:]
        if dy is None:
            return None, None, d_sum, d_sum if ctx.adds else None, None, None
        if torch.is_grad_enabled():
            dx, dw, db = again(lambda x, w, b: _plain_norm(ctx.kind, x, w, b, ctx.eps), (x, weight, bias), dy)
            dx = dx if d_sum is None or dx is None else dx + d_sum
        else:
            result = rows.Normed(x, x, mean, by)
            dx, dw, db = rows.norm_backward(ctx.kind, dy, d_sum, result, weight, want_w, want_b)
        return None, None, dx, dx if ctx.adds else None, dw, db


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, act: str, gate: Tensor, up: Tensor | None) -> Tensor:
        ctx.act = act
        ctx.save_for_backward(gate, up)
        return plain_gated(gate, up, act) if act in UPS else rows.gate(act, gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, *again(lambda gate, up: plain_gated(gate, up, ctx.act), (gate, up), grads[0])
        if ctx.act in UPS:
            with torch.enable_grad():
                inputs = tuple(None if t is None else t.detach().requires_grad_() for t in (gate, up))
                gradients = again(lambda gate, up: plain_gated(gate, up, ctx.act), inputs, grads[0])
            return None, *(None if t is None else t.detach() for t in gradients)
        return None, *rows.gate_backward(ctx.act, grads[0], gate, up)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, act: str, eps: float, gate: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
        result = rows.norm("rms", x, None, weight, None, eps)
        ctx.act, ctx.eps = act, eps
        ctx.save_for_backward(gate, result.sum, weight)
        return rows.gate(act, gate, result.y.flatten(-2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (gate, x, weight) = grads, ctx.saved_tensors
        if torch.is_grad_enabled():

            def plain(gate: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
                return plain_gated(gate, plain_rms_norm(x, weight, ctx.eps).flatten(-2), ctx.act)

            return None, None, *again(plain, (gate, x, weight), dy)
        result = rows.norm("rms", x, None, weight, None, ctx.eps)
        d_gate, d_normed = rows.gate_backward(ctx.act, dy, gate, result.y.flatten(-2), over=True)
        assert d_normed is not None
        dx, dw, _ = rows.norm_backward(
            "rms", d_normed.view(x.shape), None, result, weight, ctx.needs_input_grad[4], False, over=True
        )
        return None, None, d_gate, dx, dw


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, cos: Tensor, sin: Tensor, pairing: str | Tensor, back: bool, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.pairing, ctx.back = pairing, back
        ctx.save_for_backward(cos, sin)
        return tuple(rows.rotate(xs, cos, sin, pairing, back))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        present = [grad for grad in grads if grad is not None]
        turned = iter(_Rotate.apply(cos, sin, ctx.pairing, not ctx.back, *present))  # type: ignore[no-untyped-call]
        return None, None, None, None, *(None if grad is None else next(turned) for grad in grads)


def again(
    run: Callable[..., Tensor], inputs: tuple[Tensor | None, ...], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of `run(*inputs)`, computed in a graph of their own so that they can be differentiated
    again."""
    trained = [t for t in inputs if t is not None and t.requires_grad]
    grads = iter(torch.autograd.grad(run(*inputs), trained, dy, create_graph=True))
    return tuple(next(grads) if t is not None and t.requires_grad else None for t in inputs)
