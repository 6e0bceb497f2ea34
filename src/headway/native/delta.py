"""The gated delta rule on the native kernels, forward and backward.

Tensors are float32 or bf16 on the CPU; log decays, betas, states and sums are float32.
`headway.attention.delta` has the formula, and the path without kernels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headway.native import interface as c
from headway.native.loader import library, threads, why_missing
from headway.native.rows import FLOATS, empty_like, run, visible


def unsupported_reason(*tensors: Tensor | None) -> str | None:
    """Returns why the kernels do not take q, k, v and the other tensors; None if they do."""
    q, _, v = tensors[:3]
    assert q is not None
    assert v is not None
    if visible(*tensors):
        return "its tensors are not plain CPU tensors, or a transform or tracer observes them"
    if q.dtype not in FLOATS:
        return f"the kernels take float32 and bf16, not {q.dtype}"
    if max(q.shape[3], v.shape[3]) > c.WIDEST:
        return f"the kernels take heads of up to {c.WIDEST} numbers"
    return None if library() is not None else why_missing()


class Rule(NamedTuple):
    """What a call has besides its tensors: `begins`, where a later document of a row begins, bool [B|1, T], or None if
    each row is one document; the other fields are arguments of `delta_attend`."""

    begins: Tensor | None
    scale: float
    unit_eps: float | None
    erases: bool


def forward(rule: Rule, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (out [B, H, T, E], state [B, H, D, E]) of the inputs q, k [B, K, T, D], v [B, H, T, E], log_decay [B, H,
    T, 1 or D], beta [B, H, T, 1] and past [B, H, D, E]."""
    inputs = _as_read(*inputs)
    _, _, v, _, _, past = inputs
    out, state = empty_like(v), torch.empty_like(past)
    struct = _struct(rule, *inputs)
    struct.out, struct.state = c.TensorStruct.of(out), state.data_ptr()
    run("headway_delta_rule", struct)
    return out, state


def backward(
    rule: Rule, inputs: Sequence[Tensor], d_out: Tensor | None, d_state: Tensor | None, over: bool = False
) -> tuple[Tensor, ...]:
    """Returns the gradients of `forward`'s inputs from those of its results, of which one may be None. With `over`, the
    gradients of q, k and v are written over those that have as many heads as v. (The kernel reads a chunk before it
    writes the chunk's gradients, and not afterwards.)"""
    inputs = _as_read(*inputs)
    q, k, v, *gates_and_past = inputs
    heads = v.shape[1]
    dq, dk, dv = (x if over and x.shape[1] == heads else empty_like(x, heads) for x in (q, k, v))
    gradients = [torch.empty_like(x) for x in gates_and_past]
    struct = _struct(rule, *inputs)
    if d_out is not None:
        d_out = _side_by_side(d_out)
        struct.d_out = c.TensorStruct.of(d_out)
    if d_state is not None:
        d_state = d_state.contiguous()
        struct.d_state = d_state.data_ptr()
    struct.dq, struct.dk, struct.dv = (c.TensorStruct.of(x) for x in (dq, dk, dv))
    struct.d_log_decay, struct.d_beta, struct.d_past = (x.data_ptr() for x in gradients)
    run("headway_delta_rule", struct)
    if k.shape[1] != heads:
        dq, dk = (x.unflatten(1, (k.shape[1], -1)).sum(2, dtype=torch.float32).to(x.dtype) for x in (dq, dk))
    return dq, dk, dv, *gradients


def _as_read(q: Tensor, k: Tensor, v: Tensor, *gates_and_past: Tensor) -> tuple[Tensor, ...]:
    return *map(_side_by_side, (q, k, v)), *(t.contiguous() for t in gates_and_past)


def _side_by_side(t: Tensor) -> Tensor:
    """Returns t [B, H, T, D] with contiguous heads (stride 1 in the last dimension), copied if needed."""
    return t if t.stride(3) == 1 or t.shape[3] == 1 else t.contiguous()


def _struct(
    rule: Rule, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, past: Tensor
) -> c.DeltaStruct:
    begins, scale, unit_eps, erases = rule
    rows, heads, count, width = v.shape
    struct = c.DeltaStruct(
        threads(), rows, heads, k.shape[1], count, k.shape[3], width, c.TYPES[q.dtype], log_decay.shape[3],
        erases, scale, -1.0 if unit_eps is None else unit_eps, *(c.TensorStruct.of(x) for x in (q, k, v)),
        c.TensorStruct(), log_decay.data_ptr(), beta.data_ptr(),
    )  # fmt: skip
    if begins is not None:
        struct.kept = begins = begins.contiguous()  # keeps the tensor alive that the struct points to
        struct.begins, struct.begins_batch = begins.data_ptr(), begins.stride(0) if len(begins) > 1 else 0
    struct.past = past.data_ptr()
    return struct
