"""Native attention as an operator of torch: `headway::attend` and `headway::attend_backward`.

`torch.compile`, `torch.export` and fake tensors see one operator with a shape rule and a backward; what it computes
is what `native` computes. Its arguments are tensors, numbers and texts: the text of the pattern of standard leaves is
parsed once a process, and the plan is made inside.

Legend: B rows, H query heads, K kv heads, T queries, S keys, D per head, Dv of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from headway.attention.autograd import no_second_derivative
from headway.attention.backends.native import kernels
from headway.attention.call import Call
from headway.attention.key_values import KeyValues
from headway.errors import BackendError
from headway.heads import Heads
from headway.native import library, why_missing
from headway.partial import Partial
from headway.patterns import parse
from headway.patterns.program import mapped, standard
from headway.scores import ALiBi, RelativeBias, Score, SoftCap
from headway.tokens import Tokens

# What torch.compiler.assume_constant_result does; that would import torch's compiler, which takes a second.
for _known in (library, why_missing):
    vars(_known)["_dynamo_marked_constant"] = True


def run(call: Call) -> Partial:
    """The partial of `call` by the operator; differentiable once in both parts."""
    out, lse = torch.ops.headway.attend(*arguments(call))
    return Partial(out, lse)


def arguments(call: Call) -> tuple[Any, ...]:
    """What the operator is given for a call."""
    sides = [_arrays(tokens) for tokens in (call.q_tokens, *(part.tokens for part in call.keys))]
    return (
        call.q,
        [part.k for part in call.keys],
        [part.v for part in call.keys],
        [t for part in call.keys for t in part.scales],
        [t for _, _, arrays in sides for t in arrays],
        [number for start, which, _ in sides for number in (start, which)],
        str(mapped(call.pattern, standard)),
        ", ".join(_text(step) for step in call.score),
        list(call.parameters),
        call.scale,
        call.dropout,
        call.seed,
        call.head_ids,
    )


def _arrays(side: Tokens) -> tuple[int, int, list[Tensor]]:
    """One side as (start or -1, which of index, document, is_global and position there are, these): what is known by
    its start needs no index."""
    start = -1 if side.start is None else side.start
    index = None if start >= 0 and side.is_global is None else side.index
    fields = (index, side.document, side.is_global, side.position)
    which = sum(1 << i for i, t in enumerate(fields) if t is not None)
    return start, which, [t for t in fields if t is not None]


def _side(count: int, start: int, which: int, arrays: list[Tensor]) -> Tokens:
    """The tokens that `_arrays` took apart; their arrays are taken from the front of `arrays`."""
    index, document, is_global, position = (arrays.pop(0) if which >> i & 1 else None for i in range(4))
    index = Tokens.range(count, start).index if index is None else index
    return Tokens(index, document, is_global, position, None if start < 0 else start)


def _text(step: Score) -> str:
    """A step as text, without its table."""
    if isinstance(step, SoftCap):
        return f"SoftCap {step.cap}"
    if isinstance(step, ALiBi):
        return "ALiBi" if step.slopes is None else f"ALiBi {' '.join(str(s) for s in step.slopes)}"
    assert isinstance(step, RelativeBias)
    return f"RelativeBias {int(step.bidirectional)} {step.max_distance}"


_pattern = lru_cache(maxsize=512)(parse)


def _step(text: str, tables: list[Tensor]) -> Score:
    """The step of a text; a table is taken from the front of `tables`."""
    name, *numbers = text.split()
    if name == "SoftCap":
        return SoftCap(float(numbers[0]))
    if name == "ALiBi":
        return ALiBi(tuple(map(float, numbers)) if numbers else None)
    return RelativeBias(tables.pop(0), bidirectional=numbers[0] == "1", max_distance=int(numbers[1]))


def _call(
    q: Tensor,
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    scales: Sequence[Tensor],
    tokens: Sequence[Tensor],
    known: Sequence[int],
    pattern: str,
    scores: str,
    tables: Sequence[Tensor],
    scale: float,
    dropout: float,
    seed: int,
    head_ids: Tensor | None,
) -> Call:
    """The call that the arguments of the operator describe. BackendError where the kernels cannot run it."""
    counts, rest = [q.shape[2], *(t.shape[2] for t in k)], list(tokens)
    sides = [_side(*side, rest) for side in zip(counts, known[::2], known[1::2], strict=True)]
    of_int8 = iter(scales)
    keys = tuple(
        KeyValues(*part, *islice(of_int8, 2 * (part[0].dtype == torch.int8)))
        for part in zip(k, v, sides[1:], strict=True)
    )
    rest = list(tables)
    steps = tuple(_step(text, rest) for text in scores.split(", ") if text)
    heads, shape = Heads.of(q.shape[1], k[0].shape[1]), _pattern(pattern)
    call = Call(q, sides[0], keys, shape, heads, scale, steps, None, dropout, seed, head_ids)
    reason = kernels.CAPABILITIES.unsupported_reason(call, True, "cpu") or kernels.limits(call)
    if reason is not None:
        raise BackendError(f"headway::attend cannot run this call: {reason}")
    return call


_ARGUMENTS = (
    "Tensor q, Tensor[] k, Tensor[] v, Tensor[] scales, Tensor[] tokens, SymInt[] known, str pattern, str scores,"
    " Tensor[] tables, float scale, float dropout, SymInt seed, Tensor? head_ids"
)


@torch.library.custom_op(
    "headway::attend", mutates_args=(), device_types="cpu", schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)"
)
def _attend(*given: Any) -> tuple[Tensor, Tensor]:
    part = kernels.forward(_call(*given))
    return part.out, part.lse


@_attend.register_fake
def _(q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
    return kernels.empty_out(q, v[0].shape[3], len(k)), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "headway::attend_backward",
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor out, Tensor lse, Tensor d_out, Tensor d_lse, {_ARGUMENTS}) -> Tensor[]",
)
def _attend_backward(out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, *given: Any) -> list[Tensor]:
    call = _call(*given)
    made = kernels.backward(call, out, lse, d_out, d_lse)
    tables = (g.to(t.dtype) for g, t in zip(made.parameters, call.parameters, strict=True))
    return [made.q, *made.k, *made.v, *tables]


@_attend_backward.register_fake
def _(
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    scales: Sequence[Tensor],
    tokens: Sequence[Tensor],
    known: Sequence[int],
    pattern: str,
    scores: str,
    tables: Sequence[Tensor],
    *rest: Any,
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (q, *k, *v, *tables)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, _, tokens, known, pattern, scores, tables, scale, dropout, seed, head_ids = inputs
    ctx.save_for_backward(*output, q, head_ids, *k, *v, *tokens, *tables)
    ctx.counts = len(k), len(v), len(tokens), len(tables)
    ctx.plain = known, pattern, scores, scale, dropout, seed


def _backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
    known, pattern, scores, scale, dropout, seed = ctx.plain
    out, lse, q, head_ids, *rest = ctx.saved_tensors
    k, v, tokens, tables = _pieces(rest, ctx.counts)
    none: list[Tensor] = []
    given = q, k, v, none, tokens, known, pattern, scores, tables, scale, dropout, seed, head_ids
    dq, *grads = torch.ops.headway.attend_backward(out, lse, d_out, d_lse, *given)
    dk, dv, d_tables = _pieces(grads, (len(k), len(v), len(tables)))
    return dq, dk, dv, [], [None] * len(tokens), None, None, None, d_tables, None, None, None, None


def _pieces(items: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    """The items in consecutive lists of so many each."""
    left = iter(items)
    return [list(islice(left, count)) for count in counts]


def _no_second(ctx: Any, *grads: Tensor) -> None:
    raise no_second_derivative("native")


_attend.register_autograd(_backward, setup_context=_setup)
_attend_backward.register_autograd(_no_second)
