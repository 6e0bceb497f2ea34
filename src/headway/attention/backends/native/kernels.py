"""Attention calls on the native kernels (src/headway/native/csrc): limits, forward, backward, and repeated calls.

The plan is that of `banded`, passed as arrays, together with the pattern as a small program for the pairs of blocks
that are only partly visible. Nothing is copied: the kernels read tensors by their strides, and slots through an order.
"""

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from headway.attention.backends.base import CPU, Capabilities, Gradients, Repeated
from headway.attention.backends.native.plan_arrays import plan_arrays
from headway.attention.call import Call
from headway.attention.key_values import KeyValues
from headway.errors import BackendError
from headway.native import interface as c
from headway.native.loader import library, threads, why_missing
from headway.partial import Partial, merge_all
from headway.patterns.program import height, lower
from headway.scores import ALiBi, RelativeBias, Score, SoftCap, wrong_heads

CAPABILITIES = Capabilities(
    devices=CPU,
    dtypes=(torch.float32, torch.bfloat16),
    gradient=CPU,
    lse=CPU,
    any_pattern=False,
    int8=True,
    stores=True,
)


KINDS: dict[type[Score], int] = {SoftCap: c.SOFT_CAP, RelativeBias: c.DISTANCE, ALiBi: c.SLOPE}
"""Score steps that the kernels know, with their numbers in the C interface."""


def limits(call: Call, device: str = "cpu") -> str | None:
    """Returns why the kernels cannot run this call, or None if they can."""
    widths = call.q.shape[-1], call.keys[0].v.shape[-1]
    if max(widths) > c.WIDEST or not min(widths):
        return f"its kernels take head sizes from 1 to {c.WIDEST}, not {sorted(widths)}"
    if len(call.score) > c.MOST_SCORES:
        return f"its kernels take up to {c.MOST_SCORES} scores, not {len(call.score)}"
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
    name = type(score).__name__
    if type(score) not in KINDS:
        return f"its kernels do not support score={name}"
    sides = (call.q_tokens, *(part.tokens for part in call.keys))
    if not isinstance(score, SoftCap) and any(t.position is not None for t in sides):
        return f"its kernels compute the distances of {name} from indices, but these tokens have positions"
    return wrong_heads(score, call.q.shape[1])


def forward(call: Call, lse: bool = True) -> Partial:
    """Returns the merged partial of all key sets, each computed in one call of the kernels."""
    return merge_all([_forward(call, number) for number in range(len(call.keys))])


def backward(call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor) -> Gradients:
    """Returns the gradients in the dtypes of q, k and v; those of the scores' tables in float32."""
    out, d_out = (_contiguous_rows(t.to(call.q.dtype)) for t in (out, d_out))
    lse, d_lse = lse.float().contiguous(), d_lse.float().contiguous()
    q, k, v, tables = zip(
        *(_backward(call, number, out, lse, d_out, d_lse) for number in range(len(call.keys))), strict=True
    )
    dq = q[0] if len(q) == 1 else torch.stack(q).float().sum(0)
    return Gradients(dq, list(k), list(v), [torch.stack(same).sum(0) for same in zip(*tables, strict=True)])


def empty_out(q: Tensor, width: int, sets: int = 1) -> Tensor:
    """Returns an uninitialized result [B, H, T, width]. If the heads of a token are adjacent in q, as projections
    leave them, and there is only one key set, they are adjacent in the result, so that the output projection needs
    no copy."""
    rows, heads, count, _ = q.shape
    if sets == 1 and heads > 1 and count > 1 and q.stride(1) < q.stride(2):
        return q.new_empty(rows, count, heads, width).transpose(1, 2)
    return q.new_empty(rows, heads, count, width)


class Arguments:
    """The structure `struct` of the C interface for one key set of a call, with everything that must live as long as
    it. The caller adds where results go. `gradient` allocates the gradients of the scores' tables, by distance."""

    def __init__(self, call: Call, number: int, gradient: bool = False) -> None:
        part = call.keys[number]
        q, k, v = (_contiguous_rows(t) for t in (call.q, part.k, part.v))
        arrays = plan_arrays(call.pattern, call.q_tokens, part.tokens, part.slots is not None)
        values = [_values(score, q.shape[1]) for score in call.score]
        learned = [gradient and bool(score.parameters) for score in call.score]
        self.gradients = [
            torch.zeros_like(t) if grad else None for t, grad in zip(values, learned, strict=True)
        ]
        scores = (c.ScoreStruct * max(1, len(values)))(
            *(
                c.ScoreStruct(
                    KINDS[type(score)], getattr(score, "max_distance", 0), _address(t), _address(grad)
                )
                for score, t, grad in zip(call.score, values, self.gradients, strict=True)
            )
        )
        ids = None if call.head_ids is None else call.head_ids.long().contiguous()
        k_scale, v_scale = (None if t is None else t.contiguous() for t in (part.k_scale, part.v_scale))
        self.plan, self.tensors = arrays, (q, k, v, ids, k_scale, v_scale, *values)
        self.struct = c.CallStruct(
            threads=threads(),
            batch=q.shape[0],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            dim=q.shape[3],
            dim_v=v.shape[3],
            type=c.TYPES[q.dtype],
            kv_type=c.TYPES[k.dtype],
            q=c.TensorStruct.of(q),
            k=c.TensorStruct.of(k),
            v=c.TensorStruct.of(v),
            k_scale=_address(k_scale),
            v_scale=_address(v_scale),
            scale_batch=0 if k_scale is None else k_scale.stride(0),
            scale_head=0 if k_scale is None else k_scale.stride(1),
            scale=call.scale,
            queries=arrays.queries,
            keys=arrays.keys,
            plan=arrays.plan,
            program=ctypes.addressof(arrays.program),
            instructions=len(arrays.program) // 4,
            scores=scores,
            score_count=len(values),
            dropout=call.dropout,
            seed=call.seed,
            first_key=call.slots[number],
            head_ids=_address(ids),
        )
        if part.slots is not None:
            self.struct.keys.order = part.slots.data_ptr()


def _address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _contiguous_rows(t: Tensor) -> Tensor:
    """Returns the tensor itself if its last dimension is contiguous, else a contiguous copy."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _values(score: Score, heads: int) -> Tensor:
    """Returns the numbers of a score for the kernels: a constant, one for each head, or one for each head and
    distance."""
    if isinstance(score, RelativeBias):
        return score.table.detach().float()[score.buckets()].t().contiguous()
    return _constants(score, heads)


@lru_cache(maxsize=64)
def _constants(score: Score, heads: int) -> Tensor:
    assert isinstance(score, ALiBi | SoftCap)
    return torch.tensor(score.of_heads(heads) if isinstance(score, ALiBi) else [score.cap])


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
    pairs = zip(call.score, arguments.gradients, strict=True)
    return dq, dk, dv, [_table_gradient(score, grad) for score, grad in pairs if grad is not None]


def _table_gradient(score: Score, by_distance: Tensor) -> Tensor:
    """Returns the gradient of a table, summed over the distances that each of its buckets stands for."""
    assert isinstance(score, RelativeBias)
    total = torch.zeros_like(score.table, dtype=torch.float32)
    return total.index_add_(0, score.buckets(), by_distance.t())


def repeat(call: Call, lse: bool = True) -> Repeated:
    """Returns a forward over one key set for other tensors of the same layout: only addresses change."""
    arguments, width = Arguments(call, 0), call.keys[0].v.shape[-1]
    arguments.struct.out = c.TensorStruct.of(empty_out(call.q, width))
    arguments.tensors = ()

    def run(q: Tensor, keys: KeyValues) -> Partial:
        out, lse = empty_out(q, width), torch.empty(q.shape[:3])
        struct = c.CallStruct.from_buffer_copy(arguments.struct)
        struct.threads = threads()
        struct.q.data, struct.k.data, struct.v.data = q.data_ptr(), keys.k.data_ptr(), keys.v.data_ptr()
        if keys.k_scale is not None and keys.v_scale is not None:
            struct.k_scale, struct.v_scale = keys.k_scale.data_ptr(), keys.v_scale.data_ptr()
        struct.out.data, struct.lse = out.data_ptr(), lse.data_ptr()
        _run("headway_forward", struct)
        return Partial(out, lse)

    return run


def _run(name: str, struct: c.CallStruct) -> None:
    native = library()
    assert native is not None, "unsupported_reason() was asked before"
    code = getattr(native.dll, name)(ctypes.byref(struct))
    if code:
        raise BackendError(f'backend="native": {name} failed: {c.ERRORS.get(code, code)}')
