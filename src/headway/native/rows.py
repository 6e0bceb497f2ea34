"""A model's row operations other than products, forward and backward: norms, gates, rotations, cross entropy.

Tensors are float32 or bf16 on the CPU, all of one call in the same dtype; statistics and sums are float32.
`headway.nn.fused` has the formulas, and the path without kernels.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headway.errors import BackendError
from headway.native import interface as c
from headway.native.loader import library, threads

FLOATS = torch.float32, torch.bfloat16


def runs(*tensors: Tensor | None) -> bool:
    """Returns whether the kernels take these tensors: not empty, of one supported dtype, and not traced (`visible`)."""
    present = [t for t in tensors if t is not None]
    dtype = present[0].dtype
    return (
        dtype in FLOATS
        and present[0].numel() > 0
        and all(t.dtype == dtype for t in present)
        and not visible(*present)
        and library() is not None
    )


def visible(*tensors: Tensor | None) -> bool:
    """Returns whether operations on these tensors must be torch's own: they are no plain tensors on the CPU, or a
    compiler, a dispatch mode, a function transform or forward-mode differentiation observes the operations."""
    return (
        any(t is not None and not (type(t) in (Tensor, torch.nn.Parameter) and t.is_cpu) for t in tensors)
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


class Normed(NamedTuple):
    """y = norm(sum) with sum = x + residual (or x); per row, `by` = 1 / sqrt(variance or mean square + eps), and `mean`
    for a layer norm."""

    y: Tensor
    sum: Tensor
    mean: Tensor | None
    by: Tensor


def norm(
    kind: str, x: Tensor, residual: Tensor | None, gain: Tensor | None, shift: Tensor | None, eps: float
) -> Normed:
    """Returns the norm of `kind` "rms" or "layer" of x + residual over the last axis."""
    x, residual, gain, shift = x.contiguous(), _whole(residual), _whole(gain), _whole(shift)
    width = x.shape[-1]
    rows = x.numel() // max(width, 1)
    y = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    by = x.new_empty(rows, dtype=torch.float32)
    mean = torch.empty_like(by) if kind == "layer" else None
    struct = c.NormStruct(
        threads(), rows, width, c.TYPES[x.dtype], c.NORMS[kind], eps,
        *addresses(x, residual, gain, shift, None if residual is None else total, y, mean, by),
    )  # fmt: skip
    run("headway_norm_rows", struct)
    return Normed(y, total, mean, by)


def norm_backward(
    kind: str,
    dy: Tensor,
    d_sum: Tensor | None,
    normed: Normed,
    gain: Tensor | None,
    of_gain: bool,
    of_shift: bool,
    over: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of the sum (plus `d_sum`, its gradient from other paths), and of gain and shift if
    `of_gain` and `of_shift`; `normed.y` is not read. With `over`, the gradient of the sum is written over dy if dy is
    contiguous."""
    x, dy, d_sum, gain = normed.sum, dy.contiguous(), _whole(d_sum), _whole(gain)
    width, dx = x.shape[-1], dy if over else torch.empty_like(x)
    d_gain, d_shift = (
        x.new_empty(width, dtype=torch.float32) if needed else None for needed in (of_gain, of_shift)
    )
    struct = c.NormStruct(
        threads(), x.numel() // max(width, 1), width, c.TYPES[x.dtype], c.NORMS[kind], 0.0,
        *addresses(x, None, gain, None, None, None, normed.mean, normed.by, dy, d_sum, dx, d_gain, d_shift),
    )  # fmt: skip
    run("headway_norm_rows", struct)
    return dx, _as(d_gain, x.dtype), _as(d_shift, x.dtype)


def gate(act: str, gate: Tensor, up: Tensor | None) -> Tensor:
    """Returns act(gate) * up, or act(gate) if `up` is None."""
    rows, ups = _rows(gate), None if up is None else _rows(up)
    y = gate.new_empty(gate.shape)
    struct = c.GateStruct(
        threads(), *rows.shape, c.TYPES[gate.dtype], c.ACTIVATIONS[act], *addresses(rows, ups),
        rows.stride(0), 0 if ups is None else ups.stride(0), *addresses(y),
    )  # fmt: skip
    run("headway_gate_rows", struct)
    return y


def gate_backward(
    act: str, dy: Tensor, gate: Tensor, up: Tensor | None, y: Tensor | None = None, over: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of gate and up; `y`, if given, is filled with the forward result again. With `over`, the
    gradient of up is written over up if up is contiguous."""
    rows, ups, dy = _rows(gate), None if up is None else _rows(up), dy.contiguous()
    d_gate = gate.new_empty(gate.shape)
    d_up = up if up is None or (over and up.is_contiguous()) else up.new_empty(up.shape)
    width = rows.shape[1]
    struct = c.GateStruct(
        threads(), *rows.shape, c.TYPES[gate.dtype], c.ACTIVATIONS[act], *addresses(rows, ups),
        rows.stride(0), 0 if ups is None else ups.stride(0), *addresses(y, dy, d_gate, d_up), width, width,
    )  # fmt: skip
    run("headway_gate_rows", struct)
    return d_gate, d_up


def rotates(xs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> bool:
    """Returns whether `rotate` takes these tensors in one pass: with equal batch, tokens and head width (at most
    `interface.WIDEST`), and angles for each token."""
    batch, _, slots, dim = xs[0].shape
    angles = cos.shape
    return (
        all((len(x), *x.shape[2:]) == (batch, slots, dim) for x in xs)
        and len(xs) <= c.MOST_ROTATED
        and angles == sin.shape
        and angles[-1] <= dim <= c.WIDEST
        and angles[-2] == slots
        and (len(angles) == 2 or angles[0] in (1, batch))
    )


def rotate(
    xs: Sequence[Tensor], cos: Tensor, sin: Tensor, pairing: str | Tensor, back: bool = False
) -> list[Tensor]:
    """Rotates up to three tensors [B, heads, T, D] by cos and sin, float32 [T, d] or [B or 1, T, d]; `back` rotates by
    the transpose. `pairing`: "halves", "adjacent", or the partner of each component, int64 [d]."""
    first, cos, sin = xs[0], cos.contiguous(), sin.contiguous()
    batch, _, slots, dim = first.shape
    xs = [x if x.stride(3) == 1 else x.contiguous() for x in xs]
    ys = [empty_like(x) for x in xs]
    unused = [c.TensorStruct()] * (c.MOST_ROTATED - len(xs))
    partner = pairing.contiguous() if isinstance(pairing, Tensor) else None
    struct = c.RotationStruct(
        threads(), batch, slots, dim, c.TYPES[first.dtype],
        *((c.TensorStruct * c.MOST_ROTATED)(*map(c.TensorStruct.of, side), *unused) for side in (xs, ys)),
        (ctypes.c_int64 * c.MOST_ROTATED)(*(x.shape[1] for x in xs)), len(xs), *addresses(cos, sin),
        cos.stride(0) if cos.dim() == 3 and len(cos) > 1 else 0, cos.shape[-1],
        c.PAIRS if isinstance(pairing, Tensor) else c.PAIRINGS[pairing], int(back), *addresses(partner),
    )  # fmt: skip
    run("headway_rotate_rows", struct)
    return ys


def cross_entropy(
    logits: Tensor, bias: Tensor | None, targets: Tensor, gradient: bool, hits: Tensor | None = None
) -> Tensor:
    """Returns -ln softmax(logits + bias)[target] of rows [N, V], float32 [N], 0 for targets below 0. With `gradient`,
    logits are overwritten with softmax - onehot. `hits`, bool [N] if given, is filled with whether the target has the
    largest logit."""
    bias, targets = _whole(bias), targets.contiguous()
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    struct = c.EntropyStruct(
        threads(), *logits.shape, c.TYPES[logits.dtype],
        *addresses(logits, bias, targets, losses, hits), int(gradient),
    )  # fmt: skip
    run("headway_entropy_rows", struct)
    return losses


def run(name: str, struct: ctypes.Structure) -> None:
    """Calls a kernel. Raises BackendError if it refuses the call."""
    kernels = library()
    assert kernels is not None
    if code := getattr(kernels.dll, name)(ctypes.byref(struct)):
        raise BackendError(f"the native kernel {name} failed: {c.ERRORS[code]}")


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """Returns the addresses of tensors; None for None."""
    return [None if t is None else t.data_ptr() for t in tensors]


def _whole(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _as(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if t is None else t.to(dtype)


def _rows(t: Tensor) -> Tensor:
    """Returns t as [rows, width] with contiguous rows, without a copy if possible."""
    rows = t.view(-1, t.shape[-1]) if t.is_contiguous() else t.reshape(-1, t.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def empty_like(x: Tensor, heads: int | None = None) -> Tensor:
    """Returns an empty [B, H, T, D] with `heads` heads (default: x's), in x's memory order: heads of a token adjacent
    ([B, T, H, D]) if they are so in x."""
    rows, present, count, dim = x.shape
    heads = present if heads is None else heads
    if present > 1 and count > 1 and x.stride(1) < x.stride(2):
        return x.new_empty(rows, count, heads, dim).transpose(1, 2)
    return x.new_empty(rows, heads, count, dim)
