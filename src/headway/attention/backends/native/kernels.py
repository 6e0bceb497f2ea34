"""The native kernels (src/headway/native/csrc) on a call: what they can run, forward, backward, and again.

The same plan as `banded`; here it is handed over as arrays, with the pattern as a small program for the pairs of
blocks on its edge, and nothing is copied: the kernels read tensors by their strides and slots by their order.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from headway.attention.backends.base import CPU, Capabilities, Gradients
from headway.attention.backends.native.arguments import Arguments, contiguous_rows, table_gradient
from headway.attention.call import Call
from headway.attention.key_values import KeyValues
from headway.errors import BackendError
from headway.native import interface as c
from headway.native import library, threads, why_missing
from headway.partial import Partial, merge_all
from headway.patterns.program import height, lower
from headway.scores import ALiBi, RelativeBias, Score, SoftCap

CAPABILITIES = Capabilities(
    devices=CPU, dtypes=(torch.float32, torch.bfloat16), gradient=CPU, lse=CPU, any_pattern=False, int8=True
)


def limits(call: Call, device: str = "cpu") -> str | None:
    """Why the kernels cannot run this call; None if they can."""
    widths = call.q.shape[-1], call.keys[0].v.shape[-1]
    if max(widths) > c.WIDEST or not min(widths):
        return f"its kernels take heads of 1 to {c.WIDEST}"
    if len(call.score) > c.MOST_SCORES:
        return f"its kernels take up to {c.MOST_SCORES} scores"
    for score in call.score:
        if reason := _score_limit(score, call):
            return reason
    program = lower(call.pattern)
    if len(program) > c.DEEPEST and height(program) > c.DEEPEST:
        return f"its kernels take patterns nested up to {c.DEEPEST} deep"
    if library() is None:
        return why_missing() or "the library is not loaded"
    return None


def _score_limit(score: Score, call: Call) -> str | None:
    if isinstance(score, SoftCap):
        return None
    if isinstance(score, ALiBi):
        heads = call.q.shape[1] if score.slopes is None else len(score.slopes)
    elif isinstance(score, RelativeBias):
        heads = score.table.shape[1]
    else:
        return f"its kernels know no score {type(score).__name__}"
    if heads != call.q.shape[1]:
        return f"{type(score).__name__} is for {heads} heads, the call has {call.q.shape[1]}"
    if any(t.position is not None for t in (call.q_tokens, *(part.tokens for part in call.keys))):
        return f"its kernels measure the distance of {type(score).__name__} by index, these tokens have positions"
    return None


def forward(call: Call, lse: bool = True) -> Partial:
    """The partial over all key sets, each in one call of the kernels, merged."""
    return merge_all([_forward(call, number) for number in range(len(call.keys))])


def backward(call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor) -> Gradients:
    """Gradients in the dtypes of q, k and v; those of the scores' tables in float32."""
    out, d_out = (contiguous_rows(t.to(call.q.dtype)) for t in (out, d_out))
    lse, d_lse = lse.float().contiguous(), d_lse.float().contiguous()
    q, k, v, tables = zip(
        *(_backward(call, number, out, lse, d_out, d_lse) for number in range(len(call.keys))), strict=True
    )
    dq = q[0] if len(q) == 1 else torch.stack(q).float().sum(0)
    return Gradients(dq, list(k), list(v), [torch.stack(same).sum(0) for same in zip(*tables, strict=True)])


def empty_out(q: Tensor, width: int, sets: int = 1) -> Tensor:
    """Room for a result [B, H, T, width] over so many key sets. Where the heads of a token lie together in q, as
    projections leave them, so they do in the result of one set: what follows needs no copy."""
    rows, heads, count, _ = q.shape
    if sets == 1 and heads > 1 and count > 1 and q.stride(1) < q.stride(2):
        return q.new_empty(rows, count, heads, width).transpose(1, 2)
    return q.new_empty(rows, heads, count, width)


def _forward(call: Call, number: int) -> Partial:
    v = call.keys[number].v
    out, lse = empty_out(call.q, v.shape[-1], len(call.keys)), torch.empty(call.q.shape[:3])
    if not out.numel() or not v.shape[2]:
        return Partial(out.zero_(), lse.fill_(float("-inf")))
    arguments = Arguments(call, number)
    arguments.struct.out, arguments.struct.lse = c.TensorStruct.of(out), lse.data_ptr()
    _run("headway_forward", arguments.struct)
    return Partial(out, lse)


def _backward(
    call: Call, number: int, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    part = call.keys[number]
    dq = torch.empty(call.q.shape, dtype=call.q.dtype)
    dk, dv = (torch.empty(t.shape, dtype=t.dtype) for t in (part.k, part.v))
    if not out.numel() or not part.v.shape[2]:
        return dq.zero_(), dk.zero_(), dv.zero_(), [torch.zeros_like(p) for p in call.parameters]
    arguments = Arguments(call, number, gradient=True)
    struct = arguments.struct
    struct.out, struct.d_out = c.TensorStruct.of(out), c.TensorStruct.of(d_out)
    struct.lse, struct.d_lse = lse.data_ptr(), d_lse.data_ptr()
    struct.dq, struct.dk, struct.dv = (c.TensorStruct.of(t) for t in (dq, dk, dv))
    _run("headway_backward", struct)
    return dq, dk, dv, [table_gradient(step) for step in arguments.steps if step.score.parameters]


class Repeat:
    """The forward over one set of keys, for tensors that lie as the call's do: only addresses change."""

    def __init__(self, call: Call, lse: bool = True) -> None:
        arguments = Arguments(call, 0)
        self._width = call.keys[0].v.shape[-1]
        arguments.struct.out = c.TensorStruct.of(empty_out(call.q, self._width))
        self._struct, self._plan = (
            arguments.struct,
            arguments.plan,
        )  # the structure points into the plan's arrays

    def __call__(self, q: Tensor, keys: KeyValues) -> Partial:
        out, lse = empty_out(q, self._width), torch.empty(q.shape[:3])
        struct = c.CallStruct.from_buffer_copy(self._struct)
        struct.threads = threads()
        struct.q.data, struct.k.data, struct.v.data = q.data_ptr(), keys.k.data_ptr(), keys.v.data_ptr()
        if keys.k_scale is not None and keys.v_scale is not None:
            struct.k_scale, struct.v_scale = keys.k_scale.data_ptr(), keys.v_scale.data_ptr()
        struct.out.data, struct.lse = out.data_ptr(), lse.data_ptr()
        _run("headway_forward", struct)
        return Partial(out, lse)


def _run(name: str, struct: c.CallStruct) -> None:
    found = library()
    assert found is not None, "unsupported_reason() was asked before"
    code = getattr(found.dll, name)(ctypes.byref(struct))
    if code:
        raise BackendError(f'backend="native": {name} failed: {c.ERRORS.get(code, code)}')
