"""Native attention as torch operators: `headway::attend` and `headway::attend_backward`.

`torch.compile`, `torch.export` and fake tensors see one operator with a shape rule and a backward; it computes what
`native` computes. Its arguments are tensors, numbers and strings: the pattern, of standard leaves, is passed as text,
which is parsed once in a process, and the plan is made inside the operator.

Legend: B rows, H query heads, K kv heads, T queries, S keys, D per head, Dv of v.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.attention.autograd import no_second_derivative
from headway.attention.backends.native import kernels
from headway.attention.call import Call
from headway.attention.key_values import KeyValues
from headway.errors import BackendError
from headway.heads import Heads
from headway.native.loader import library, why_missing
from headway.partial import Partial
from headway.patterns import parse
from headway.patterns.program import mapped, standard
from headway.scores import ALiBi, RelativeBias, Score, SoftCap
from headway.tokens import Tokens

# The effect of torch.compiler.assume_constant_result, which would import torch's compiler, and that takes a second.
for _known in (library, why_missing):
    vars(_known)["_dynamo_marked_constant"] = True


class OpArguments(NamedTuple):
    """The arguments of the operator, in the order of its schema.

    scales      scales of the int8 key sets, two for each
    tokens      the arrays of the queries and of each key set (`_arrays`)
    known       two numbers for the queries and for each key set: the start (or -1), and which arrays are present, as
                bits
    scores      the score steps, as text; `tables`: their tensors
    """

    q: Tensor
    k: Sequence[Tensor]
    v: Sequence[Tensor]
    scales: Sequence[Tensor]
    tokens: Sequence[Tensor]
    known: Sequence[int]
    pattern: str
    scores: str
    tables: Sequence[Tensor]
    scale: float
    dropout: float
    seed: int
    head_ids: Tensor | None


_SCHEMA = (
    "Tensor q, Tensor[] k, Tensor[] v, Tensor[] scales, Tensor[] tokens, SymInt[] known, str pattern, str scores,"
    " Tensor[] tables, float scale, float dropout, SymInt seed, Tensor? head_ids"
)


def run(call: Call) -> Partial:
    """Returns the partial of `call` from the operator; differentiable once, in both parts."""
    out, lse = torch.ops.headway.attend(*arguments(call))
    return Partial(out, lse)


def arguments(call: Call) -> OpArguments:
    """Returns the arguments of the operator for a call."""
    sides = [_arrays(tokens) for tokens in (call.q_tokens, *(part.tokens for part in call.keys))]
    return OpArguments(
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
    """Returns one side as (start or -1, bits, arrays): bit i is set if array i of index, document, is_global and
    position is present. With a start, the index is not needed, unless there are global tokens.

    Bits 0b0011: index and document."""
    start = -1 if side.start is None else side.start
    index = None if start >= 0 and side.is_global is None else side.index
    fields = (index, side.document, side.is_global, side.position)
    which = sum(1 << i for i, t in enumerate(fields) if t is not None)
    return start, which, [t for t in fields if t is not None]


def _side(count: int, start: int, which: int, arrays: list[Tensor]) -> Tokens:
    """Restores the tokens that `_arrays` took apart, removing their arrays from the front of `arrays`."""
    index, document, is_global, position = (arrays.pop(0) if which >> i & 1 else None for i in range(4))
    index = Tokens.range(count, start).index if index is None else index
    return Tokens(index, document, is_global, position, None if start < 0 else start)


def _text(step: Score) -> str:
    """Returns a step as text, without its table."""
    if isinstance(step, SoftCap):
        return f"SoftCap {step.cap}"
    if isinstance(step, ALiBi):
        return "ALiBi" if step.slopes is None else f"ALiBi {' '.join(str(s) for s in step.slopes)}"
    assert isinstance(step, RelativeBias)
    return f"RelativeBias {int(step.bidirectional)} {step.max_distance}"


_pattern = lru_cache(maxsize=512)(parse)


def _step(text: str, tables: list[Tensor]) -> Score:
    """Parses the text of a step; its table is removed from the front of `tables`."""
    name, *numbers = text.split()
    if name == "SoftCap":
        return SoftCap(float(numbers[0]))
    if name == "ALiBi":
        return ALiBi(tuple(map(float, numbers)) if numbers else None)
    return RelativeBias(tables.pop(0), bidirectional=numbers[0] == "1", max_distance=int(numbers[1]))


def _call(args: OpArguments) -> Call:
    """Restores the call from the arguments of the operator. Raises BackendError if the kernels cannot run it."""
    q, k, known, arrays = args.q, args.k, args.known, list(args.tokens)
    counts = [q.shape[2], *(t.shape[2] for t in k)]
    sides = [_side(*side, arrays) for side in zip(counts, known[::2], known[1::2], strict=True)]
    of_int8 = iter(args.scales)
    keys = tuple(
        KeyValues(*part, *islice(of_int8, 2 * (part[0].dtype == torch.int8)))
        for part in zip(k, args.v, sides[1:], strict=True)
    )
    tables = list(args.tables)
    score = tuple(_step(text, tables) for text in args.scores.split(", ") if text)
    heads, pattern = Heads.of(q.shape[1], k[0].shape[1]), _pattern(args.pattern)
    options = (args.dropout, args.seed, args.head_ids)
    call = Call(q, sides[0], keys, pattern, heads, args.scale, score, None, *options)
    reason = kernels.CAPABILITIES.unsupported_reason(call, True, "cpu") or kernels.limits(call)
    if reason is not None:
        raise BackendError(f"headway::attend cannot run this call: {reason}")
    return call


@torch.library.custom_op(
    "headway::attend", mutates_args=(), device_types="cpu", schema=f"({_SCHEMA}) -> (Tensor, Tensor)"
)
def _attend(*args: Any) -> tuple[Tensor, Tensor]:
    part = kernels.forward(_call(OpArguments(*args)))
    return part.out, part.lse


@_attend.register_fake
def _(q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
    return kernels.empty_out(q, v[0].shape[3], len(k)), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "headway::attend_backward",
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor out, Tensor lse, Tensor d_out, Tensor d_lse, {_SCHEMA}) -> Tensor[]",
)
def _attend_backward(out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, *args: Any) -> list[Tensor]:
    call = _call(OpArguments(*args))
    grads = kernels.backward(call, out, lse, d_out, d_lse)
    tables = (g.to(t.dtype) for g, t in zip(grads.parameters, call.parameters, strict=True))
    return [grads.q, *grads.k, *grads.v, *tables]


@_attend_backward.register_fake
def _(out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, *args: Any) -> list[Tensor]:
    at = OpArguments(*args)
    return [t.new_empty(t.shape) for t in (at.q, *at.k, *at.v, *at.tables)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    args = OpArguments(*inputs)
    tensors: dict[str, Any] = {"k": args.k, "v": args.v, "tokens": args.tokens, "tables": args.tables}
    ctx.save_for_backward(*output, args.q, args.head_ids, *chain(*tensors.values()))
    ctx.counts = {name: len(sequence) for name, sequence in tensors.items()}
    absent: dict[str, Any] = dict.fromkeys(("q", "head_ids", *tensors))
    ctx.plain = args._replace(**absent, scales=[])


def _backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
    out, lse, q, head_ids, *saved = ctx.saved_tensors
    tensors = _pieces(saved, ctx.counts)
    args = ctx.plain._replace(q=q, head_ids=head_ids, **tensors)
    dq, *grads = torch.ops.headway.attend_backward(out, lse, d_out, d_lse, *args)
    pieces = _pieces(grads, {name: n for name, n in ctx.counts.items() if name != "tokens"})
    absent: list[Any] = [None]
    tokens = absent * ctx.counts["tokens"]
    return OpArguments(*absent * len(args))._replace(q=dq, scales=[], tokens=tokens, **pieces)


def _pieces(items: Sequence[Tensor], counts: dict[str, int]) -> dict[str, Any]:
    """Splits the items into consecutive lists, named and sized by `counts`."""
    remaining = iter(items)
    return {name: list(islice(remaining, count)) for name, count in counts.items()}


def _no_second(ctx: Any, *grads: Tensor) -> None:
    raise no_second_derivative("native")


_attend.register_autograd(_backward, setup_context=_setup)
_attend_backward.register_autograd(_no_second)
