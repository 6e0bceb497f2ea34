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

from headway import native
from headway.attention.banded import Side
from headway.attention.call import Call
from headway.attention.plan import plan
from headway.errors import BackendError
from headway.native import interface as c
from headway.partial import Partial
from headway.patterns import And, Causal, Full, GlobalKeys, GlobalQueries, Or, Pattern, Sink, Window
from headway.scores import ALiBi, RelativeBias, Score, SoftCap, alibi_slopes
from headway.tokens import Tokens

DTYPES = (torch.float32, torch.bfloat16)
FAR = 2**30


def obstacle(call: Call) -> str | None:
    """Why the kernels cannot run this call; None if they can."""
    if call.q.device.type not in ("cpu", "meta"):
        return f"its kernels run on a CPU, not on {call.q.device.type}"
    if call.q.dtype not in DTYPES:
        return f"its kernels take float32 and bfloat16, not {str(call.q.dtype).removeprefix('torch.')}"
    if max(call.q.shape[-1], *(part.v.shape[-1] for part in call.keys)) > 512:
        return "its kernels take heads of up to 512"
    if unknown := [s for s in call.score if not isinstance(s, SoftCap | ALiBi | RelativeBias)]:
        return f"its kernels know no score {type(unknown[0]).__name__}"
    if native.library() is None:
        return native.why_missing() or "the library is not loaded"
    return None


def run_forward(call: Call) -> Partial:
    """The partial over all key sets, each in one call of the kernels, merged."""
    parts = [_forward(call, number) for number in range(len(call.keys))]
    part = parts[0]
    for more in parts[1:]:
        part = part.merge(more)
    return part


def run_backward(
    call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """Gradients of q, of each k, of each v (in their dtype) and of the tensors of the scores (float32)."""
    made = [_backward(call, number, out, lse, d_out, d_lse) for number in range(len(call.keys))]
    dq = made[0][0]
    for more in made[1:]:
        dq = dq + more[0]
    extra = [sum(g[1:], g[0]) for g in zip(*(m[3] for m in made), strict=True)]
    return dq, [m[1] for m in made], [m[2] for m in made], extra


def _forward(call: Call, number: int) -> Partial:
    batch, heads, count, _ = call.q.shape
    v = call.keys[number].v
    out = torch.empty(batch, heads, count, v.shape[-1], dtype=call.q.dtype)
    lse = torch.empty(batch, heads, count)
    if not out.numel() or not v.shape[2]:
        return Partial(out.zero_(), lse.fill_(float("-inf")))
    with _Request(call, number) as request:
        request.call.out, request.call.lse = c.TensorRef.of(out), lse.data_ptr()
        request.run("headway_forward")
    return Partial(out, lse)


def _backward(
    call: Call, number: int, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    part = call.keys[number]
    dq = torch.empty(call.q.shape, dtype=call.q.dtype)
    dk, dv = (torch.empty(t.shape, dtype=t.dtype) for t in (part.k, part.v))
    if not out.numel() or not part.v.shape[2]:
        return dq.zero_(), dk.zero_(), dv.zero_(), [torch.zeros_like(p) for p in call.parameters]
    out, d_out = (_rows(t.to(call.q.dtype)) for t in (out, d_out))
    lse, d_lse = lse.float().contiguous(), d_lse.float().contiguous()
    with _Request(call, number, gradient=True) as request:
        r = request.call
        r.out, r.d_out, r.lse, r.d_lse = (
            c.TensorRef.of(out),
            c.TensorRef.of(d_out),
            lse.data_ptr(),
            d_lse.data_ptr(),
        )
        r.dq, r.dk, r.dv = c.TensorRef.of(dq), c.TensorRef.of(dk), c.TensorRef.of(dv)
        request.run("headway_backward")
    return dq, dk, dv, request.score_gradients()


def _rows(t: Tensor) -> Tensor:
    """The tensor itself where its last dimension is contiguous."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


class _Request:
    """One key set of a call as the C structure, and everything that must live as long as it."""

    def __init__(self, call: Call, number: int, gradient: bool = False) -> None:
        part = call.keys[number]
        self.q, self.k, self.v = _rows(call.q), _rows(part.k), _rows(part.v)
        layout = _layout(call.pattern, call.q_tokens, part.tokens)
        self.layout = layout
        self.scores, self.steps = call.score, [_step(s, call, gradient) for s in call.score]
        self.score_array = (c.Score * max(1, len(self.steps)))(*(s.ref for s in self.steps))
        self.head_ids = None if call.head_ids is None else call.head_ids.long().contiguous()
        batch, heads, _, dim = call.q.shape
        self.call = c.Call(
            abi=c.ABI,
            threads=native.threads(),
            batch=batch,
            heads=heads,
            kv_heads=call.heads.kv_heads,
            dim=dim,
            dim_v=part.v.shape[-1],
            type=c.TYPES[call.q.dtype],
            kv_type=c.TYPES[part.k.dtype],
            q=c.TensorRef.of(self.q),
            k=c.TensorRef.of(self.k),
            v=c.TensorRef.of(self.v),
            scale=call.scale,
            queries=layout.queries,
            keys=layout.keys,
            plan=layout.plan,
            program=layout.program,
            instructions=len(layout.program) // 4,
            scores=self.score_array,
            score_count=len(self.steps),
            dropout=call.dropout,
            seed=call.seed,
            first_key=call.slots[number],
            head_ids=None if self.head_ids is None else self.head_ids.data_ptr(),
        )

    def __enter__(self) -> _Request:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, name: str) -> None:
        library = native.library()
        assert library is not None, "obstacle() was asked before"
        code = getattr(library.dll, name)(ctypes.byref(self.call))
        if code:
            raise BackendError(f'backend="native": {name} failed: {c.ERRORS.get(code, code)}')

    def score_gradients(self) -> list[Tensor]:
        """Gradients of the tensors of the scores, in the order of `Call.parameters`."""
        return [s.parameter_gradient() for s in self.steps if s.score.parameters]


@dataclass(frozen=True, eq=False)
class _Layout:
    """Tokens, plan and program of one call as the structures of the C interface, with the arrays behind them."""

    queries: c.Side
    keys: c.Side
    plan: c.Plan
    program: ctypes.Array[ctypes.c_int32]
    arrays: tuple[Tensor, ...]


def _layout(pattern: Pattern, q: Tokens, k: Tokens) -> _Layout:
    """`_made`, remembered for tokens that are known without looking at data."""
    if q.start is not None and k.start is not None and q.is_global is None and k.is_global is None:
        return _remembered(pattern, q.start, q.count, k.start, k.count)
    return _made(pattern, q, k)


@lru_cache(maxsize=64)
def _remembered(pattern: Pattern, q_start: int, q_count: int, k_start: int, k_count: int) -> _Layout:
    return _made(pattern, Tokens.range(q_count, q_start), Tokens.range(k_count, k_start))


def _made(pattern: Pattern, q: Tokens, k: Tokens) -> _Layout:
    arrays: list[Tensor] = []

    def ref(t: Tensor, dtype: torch.dtype = torch.int32) -> int:
        arrays.append(t.to(dtype).contiguous())
        return arrays[-1].data_ptr()

    def side(s: Side) -> c.Side:
        t = s.tokens
        rows = max(t.rows, 1 if s.order is None else s.order.shape[0])
        t = t.expand(rows)
        return c.Side(
            index=ref(t.index),
            document=None if t.document is None else ref(t.document),
            is_global=None if t.is_global is None else ref(t.is_global, torch.uint8),
            order=None if s.order is None else ref(s.order.expand(rows, -1)),
            rows=rows,
            count=t.count,
        )

    sides = Side(q, pattern.dilation), Side(k, pattern.dilation)
    rows = max(s.tokens.rows for s in sides)
    plans = [
        plan(pattern, *(s.tokens.select_rows(torch.tensor([b])) for s in sides), c.TILE, c.BLOCK)
        for b in range(rows)
    ]
    offset, first = 0, [0]
    for p in plans:
        first += [offset + n for n in p.first[1:]]
        offset += len(p.begin)
    runs = c.Plan(
        first=ref(torch.tensor(first)),
        begin=ref(torch.tensor([n for p in plans for n in p.begin])),
        end=ref(torch.tensor([n for p in plans for n in p.end])),
        full=ref(torch.tensor([n for p in plans for n in p.full]), torch.uint8),
        rows=rows,
        tiles=len(plans[0].first) - 1,
        tile=c.TILE,
    )
    code = program(pattern)
    queries, keys = (side(s) for s in sides)
    return _Layout(queries, keys, runs, (ctypes.c_int32 * len(code))(*code), tuple(arrays))


def program(pattern: Pattern) -> list[int]:
    """The pattern for the kernels' stack machine: postfix, four numbers an instruction."""
    match pattern:
        case Full():
            return [c.FULL, 0, 0, 0]
        case Causal():
            return [c.CAUSAL, 0, 0, 0]
        case Window():
            first, last = -pattern.before * pattern.step, pattern.after * pattern.step
            return [c.WINDOW, max(first, -FAR), min(last, FAR), pattern.step]
        case Sink():
            return [c.SINK, min(pattern.count, FAR), 0, 0]
        case GlobalKeys():
            return [c.GLOBAL_KEYS, 0, 0, 0]
        case GlobalQueries():
            return [c.GLOBAL_QUERIES, 0, 0, 0]
        case And() | Or():
            join = [c.AND if isinstance(pattern, And) else c.OR, 0, 0, 0]
            code = program(pattern.parts[0])
            for part in pattern.parts[1:]:
                code += program(part) + join
            return code
    raise BackendError(f'backend="native": no program for {type(pattern).__name__}')


@dataclass(frozen=True, eq=False)
class _Step:
    """A score with the array that the kernels read: a constant, or a bias by clipped distance for each head."""

    score: Score
    ref: c.Score
    values: Tensor
    gradient: Tensor | None

    def parameter_gradient(self) -> Tensor:
        assert isinstance(self.score, RelativeBias)
        assert self.gradient is not None
        reach = self.gradient.shape[1] // 2
        bucket = self.score.bucket(torch.arange(-reach, reach + 1))
        return torch.zeros_like(self.score.table).index_add_(
            0, bucket, self.gradient.t().to(self.score.table.dtype)
        )


def _step(score: Score, call: Call, gradient: bool) -> _Step:
    reach = 0
    if isinstance(score, SoftCap):
        kind, values = c.SOFT_CAP, torch.tensor([score.cap])
    elif isinstance(score, ALiBi):
        slopes = alibi_slopes(call.q.shape[1]) if score.slopes is None else score.slopes
        kind, values = c.SLOPE, torch.tensor(slopes)
    else:
        assert isinstance(score, RelativeBias)
        reach = score.max_distance
        at = score.bucket(torch.arange(-reach, reach + 1))
        kind, values = c.DISTANCE, score.table.detach()[at].t()
    values = values.float().contiguous()
    total = torch.zeros_like(values) if gradient and score.parameters else None
    ref = c.Score(kind, reach, values.data_ptr(), None if total is None else total.data_ptr())
    return _Step(score, ref, values, total)
