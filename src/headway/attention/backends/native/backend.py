"""Backend `native`: any pattern on a CPU through our own kernels (src/headway/native/csrc).

The same plan as `banded`; here it is handed over as arrays, with the pattern as a small program for the pairs of
blocks on its edge, and nothing is copied: the kernels read tensors by their strides and slots by their order.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from headway.attention.backends.native.arguments import Layout, layout, program
from headway.attention.call import Call
from headway.attention.key_values import KeyValues
from headway.errors import BackendError
from headway.native import interface as c
from headway.native import library, threads, why_missing
from headway.partial import Partial, merge_all
from headway.scores import ALiBi, RelativeBias, Score, SoftCap, alibi_slopes

DTYPES = (torch.float32, torch.bfloat16)


def unsupported_reason(call: Call) -> str | None:
    """Why the kernels cannot run this call; None if they can."""
    if call.q.dtype not in DTYPES:
        return f"its kernels take float32 and bfloat16, not {str(call.q.dtype).removeprefix('torch.')}"
    widths = call.q.shape[-1], call.keys[0].v.shape[-1]
    if max(widths) > c.WIDEST or not min(widths):
        return f"its kernels take heads of 1 to {c.WIDEST}"
    if len(call.score) > c.MOST_SCORES:
        return f"its kernels take up to {c.MOST_SCORES} scores"
    for score in call.score:
        if reason := _score_obstacle(score, call):
            return reason
    if program(call.pattern)[1] > c.DEEPEST:
        return f"its kernels take patterns nested up to {c.DEEPEST} deep"
    if library() is None:
        return why_missing() or "the library is not loaded"
    return None


def _score_obstacle(score: Score, call: Call) -> str | None:
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


def run_forward(call: Call) -> Partial:
    """The partial over all key sets, each in one call of the kernels, merged."""
    return merge_all([_forward(call, number) for number in range(len(call.keys))])


def run_backward(
    call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """Gradients of q, of each k, of each v (in their dtype) and of the tensors of the scores."""
    out, d_out = (_rows(t.to(call.q.dtype)) for t in (out, d_out))
    lse, d_lse = lse.float().contiguous(), d_lse.float().contiguous()
    made = [_backward(call, number, out, lse, d_out, d_lse) for number in range(len(call.keys))]
    dq = made[0][0] if len(made) == 1 else torch.stack([m[0] for m in made]).float().sum(0)
    extra = [torch.stack(grads).sum(0) for grads in zip(*(m[3] for m in made), strict=True)]
    return dq, [m[1] for m in made], [m[2] for m in made], extra


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
    request = _Request(call, number)
    request.call.out, request.call.lse = c.TensorRef.of(out), lse.data_ptr()
    _run("headway_forward", request.call)
    return Partial(out, lse)


def _backward(
    call: Call, number: int, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    part = call.keys[number]
    dq = torch.empty(call.q.shape, dtype=call.q.dtype)
    dk, dv = (torch.empty(t.shape, dtype=t.dtype) for t in (part.k, part.v))
    if not out.numel() or not part.v.shape[2]:
        return dq.zero_(), dk.zero_(), dv.zero_(), [torch.zeros_like(p) for p in call.parameters]
    request = _Request(call, number, gradient=True)
    r = request.call
    r.out, r.d_out = c.TensorRef.of(out), c.TensorRef.of(d_out)
    r.lse, r.d_lse = lse.data_ptr(), d_lse.data_ptr()
    r.dq, r.dk, r.dv = c.TensorRef.of(dq), c.TensorRef.of(dk), c.TensorRef.of(dv)
    _run("headway_backward", r)
    return dq, dk, dv, [_gradient(step) for step in request.steps if step.score.parameters]


class Prepared:
    """The forward of a call over one set of keys, for tensors that lie as the call's do: only addresses change."""

    def __init__(self, call: Call) -> None:
        request = _Request(call, 0)
        self._width = call.keys[0].v.shape[-1]
        request.call.out = c.TensorRef.of(empty_out(call.q, self._width))
        self._call, self._layout = bytes(request.call), request.layout

    def run(self, q: Tensor, part: KeyValues) -> Partial:
        """The partial of q over these keys."""
        out, lse = empty_out(q, self._width), torch.empty(q.shape[:3])
        call = c.Call.from_buffer_copy(self._call)
        call.threads = threads()
        call.q.data, call.k.data, call.v.data = q.data_ptr(), part.k.data_ptr(), part.v.data_ptr()
        if part.k_scale is not None and part.v_scale is not None:
            call.k_scale, call.v_scale = part.k_scale.data_ptr(), part.v_scale.data_ptr()
        call.out.data, call.lse = out.data_ptr(), lse.data_ptr()
        _run("headway_forward", call)
        return Partial(out, lse)


def _rows(t: Tensor) -> Tensor:
    """The tensor itself where its last dimension is contiguous."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


class _Request:
    """One key set of a call as the C structure, beside everything that must live as long as it."""

    def __init__(self, call: Call, number: int, gradient: bool = False) -> None:
        part = call.keys[number]
        q, k, v = _rows(call.q), _rows(part.k), _rows(part.v)
        at: Layout = layout(call.pattern, call.q_tokens, part.tokens)
        self.steps = [_step(score, q.shape[1], gradient) for score in call.score]
        scores = (c.Score * max(1, len(self.steps)))(*(step.ref for step in self.steps))
        ids = None if call.head_ids is None else call.head_ids.long().contiguous()
        k_scale, v_scale = (None if t is None else t.contiguous() for t in (part.k_scale, part.v_scale))
        self.layout = at
        self.held = q, k, v, scores, ids, k_scale, v_scale
        self.call = c.Call(
            abi=c.ABI,
            threads=threads(),
            batch=q.shape[0],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            dim=q.shape[3],
            dim_v=v.shape[3],
            type=c.TYPES[q.dtype],
            kv_type=c.TYPES[k.dtype],
            q=c.TensorRef.of(q),
            k=c.TensorRef.of(k),
            v=c.TensorRef.of(v),
            k_scale=None if k_scale is None else k_scale.data_ptr(),
            v_scale=None if v_scale is None else v_scale.data_ptr(),
            scale=call.scale,
            queries=at.queries,
            keys=at.keys,
            plan=at.plan,
            program=at.program,
            instructions=len(at.program) // 4,
            scores=scores,
            score_count=len(self.steps),
            dropout=call.dropout,
            seed=call.seed,
            first_key=call.slots[number],
            head_ids=None if ids is None else ids.data_ptr(),
        )


def _run(name: str, call: c.Call) -> None:
    found = library()
    assert found is not None, "obstacle() was asked before"
    code = getattr(found.dll, name)(ctypes.byref(call))
    if code:
        raise BackendError(f'backend="native": {name} failed: {c.ERRORS.get(code, code)}')


@dataclass(frozen=True, eq=False)
class _Step:
    """A score with the array that the kernels read: a constant, or a number for each head and distance."""

    score: Score
    ref: c.Score
    values: Tensor
    gradient: Tensor | None


def _step(score: Score, heads: int, gradient: bool) -> _Step:
    reach = 0
    if isinstance(score, RelativeBias):
        kind, reach = c.DISTANCE, score.max_distance
        values = score.table.detach().float()[_buckets(score)].t().contiguous()
    else:
        assert isinstance(score, SoftCap | ALiBi)
        kind, values = _constants(score, heads)
    total = torch.zeros_like(values) if gradient and score.parameters else None
    at = c.Score(kind, reach, values.data_ptr(), None if total is None else total.data_ptr())
    return _Step(score, at, values, total)


@lru_cache(maxsize=64)
def _constants(score: SoftCap | ALiBi, heads: int) -> tuple[int, Tensor]:
    if isinstance(score, SoftCap):
        return c.SOFT_CAP, torch.tensor([score.cap])
    return c.SLOPE, torch.tensor(alibi_slopes(heads) if score.slopes is None else score.slopes)


def _buckets(score: RelativeBias) -> Tensor:
    """The bucket of each distance from -max_distance to max_distance; those beyond share the last ones."""
    return score.bucket(torch.arange(-score.max_distance, score.max_distance + 1))


def _gradient(step: _Step) -> Tensor:
    """The gradient of a table, from those of the distances that each of its buckets stands for."""
    score, by_distance = step.score, step.gradient
    assert isinstance(score, RelativeBias)
    assert by_distance is not None
    total = torch.zeros_like(score.table, dtype=torch.float32)
    return total.index_add_(0, _buckets(score), by_distance.t())
