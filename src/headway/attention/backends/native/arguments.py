"""What the native kernels read besides tensors: tokens, plan and program of a call, as arrays of the C interface.

Tokens that are known without looking at data are laid out once a process; others once for as long as these very
tokens live unchanged, so the layers of a model and the backward share one layout.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from headway.attention.backends.banded import Side
from headway.attention.plan import plan
from headway.errors import BackendError
from headway.native import interface as c
from headway.patterns import And, Causal, Full, GlobalKeys, GlobalQueries, Or, Pattern, Sink, Window
from headway.tokens import Tokens

FAR = 2**30
"""Indices stay below it, so that differences of two fit into 32 bits; a window that reaches further has no end."""

FEW = 16
"""Queries up to which keys are taken in the order in which they lie: sorting them costs more than it saves."""

KEPT = 8
"""Layouts kept for the same tokens of the queries."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Tokens, plan and program of one call, and the arrays that they point into."""

    queries: c.Side
    keys: c.Side
    plan: c.Plan
    program: ctypes.Array[ctypes.c_int32]
    arrays: tuple[object, ...]


_Versions = tuple[int, ...]
_Known = dict[tuple[Pattern, ref[Tokens]], tuple[_Versions, Layout]]
_known: WeakKeyDictionary[Tokens, _Known] = WeakKeyDictionary()


def layout(pattern: Pattern, q: Tokens, k: Tokens) -> Layout:
    """The layout of one key set of a call, new or remembered. BackendError for indices of 2^30 or more."""
    if q.start is not None and k.start is not None and q.is_global is None and k.is_global is None:
        return _regular(pattern, q.start, q.count, k.start, k.count)
    versions = _versions(q, k)
    if versions is None:
        return _made(pattern, q, k)
    remembered, key = _known.setdefault(q, {}), (pattern, ref(k))
    found = remembered.get(key)
    if found is not None and found[0] == versions:
        return found[1]
    if len(remembered) >= KEPT:
        remembered.clear()
    made = _made(pattern, q, k)
    remembered[key] = versions, made
    return made


def _versions(*sides: Tokens) -> _Versions | None:
    """How often each tensor was changed in place; None where torch does not count."""
    tensors = [t for s in sides for t in (s.index, s.document, s.is_global) if t is not None]
    return None if any(t.is_inference() for t in tensors) else tuple(t._version for t in tensors)


@lru_cache(maxsize=64)
def _regular(pattern: Pattern, q_start: int, q_count: int, k_start: int, k_count: int) -> Layout:
    return _made(pattern, Tokens.range(q_count, q_start), Tokens.range(k_count, k_start))


def _made(pattern: Pattern, q: Tokens, k: Tokens) -> Layout:
    arrays: list[object] = []

    def tensor(t: Tensor | None, dtype: torch.dtype = torch.int32) -> int | None:
        if t is None:
            return None
        made = t.to(dtype).contiguous()
        arrays.append(made)
        return made.data_ptr()

    def numbers(kind: str, values: Iterable[int]) -> int:
        made = array(kind, values)
        arrays.append(made)
        return made.buffer_info()[0]

    def side(tokens: Tokens, order: Tensor | None) -> c.Side:
        rows = tokens.rows
        t = tokens.expand(rows)
        at = None if order is None else order.expand(rows, -1)
        globals_ = tensor(t.is_global, torch.uint8)
        return c.Side(tensor(t.index), tensor(t.document), globals_, tensor(at), rows, t.count)

    for tokens in (q, k):
        if (tokens.index >= FAR).any():
            raise BackendError(
                f'backend="native": token {int(tokens.index.max())} of its document is beyond 2^30, where its '
                'kernels stop counting; backend="banded" goes on'
            )
    q, k = _small_documents(q, k)
    q_side = Side(q, pattern.dilation)
    q, q_order, k_order = q_side.tokens, q_side.order, None
    if q.count > FEW:
        k_side = Side(k, pattern.dilation)
        k, k_order = k_side.tokens, k_side.order
    rows = max(q.rows, k.rows)
    made = plan(pattern, q, k, c.TILE, c.BLOCK, apart=True)
    runs = c.Plan(
        numbers("i", made.first),
        numbers("i", made.begin),
        numbers("i", made.end),
        numbers("B", made.full),
        rows,
        -(-q.count // c.TILE),
        c.TILE,
    )
    code, _ = program(pattern)
    return Layout(
        side(q, q_order), side(k, k_order), runs, (ctypes.c_int32 * len(code))(*code), tuple(arrays)
    )


def _small_documents(q: Tokens, k: Tokens) -> tuple[Tokens, Tokens]:
    """The same tokens with documents whose numbers fit into 32 bits."""
    sides = [t for t in (q, k) if t.document is not None and t.document.numel()]
    if all(int(t.document.abs().max()) < FAR for t in sides if t.document is not None):
        return q, k
    rows = max(q.rows, k.rows)
    both = torch.cat((q.documents.expand(rows, -1), k.documents.expand(rows, -1)), 1)
    small = both.unique(return_inverse=True)[1].view_as(both).split((q.count, k.count), 1)
    q, k = (
        Tokens(t.index.expand(rows, -1), d, None if t.is_global is None else t.is_global.expand(rows, -1))
        for t, d in zip((q, k), small, strict=True)
    )
    return q, k


def program(pattern: Pattern) -> tuple[list[int], int]:
    """The pattern for the kernels' stack machine, in postfix, four numbers an instruction; and the height that
    its stack grows to."""
    match pattern:
        case Full():
            return [c.FULL, 0, 0, 0], 1
        case Causal():
            return [c.CAUSAL, 0, 0, 0], 1
        case Window():
            first, last = -pattern.before * pattern.step, pattern.after * pattern.step
            return [c.WINDOW, max(first, -FAR), min(last, FAR), min(pattern.step, FAR)], 1
        case Sink():
            return [c.SINK, min(pattern.count, FAR), 0, 0], 1
        case GlobalKeys():
            return [c.GLOBAL_KEYS, 0, 0, 0], 1
        case GlobalQueries():
            return [c.GLOBAL_QUERIES, 0, 0, 0], 1
        case And() | Or():
            join = [c.AND if isinstance(pattern, And) else c.OR, 0, 0, 0]
            code, height = program(pattern.parts[0])
            for part in pattern.parts[1:]:
                more, above = program(part)
                code += more + join
                height = max(height, above + 1)
            return code, height
    raise BackendError(f'backend="native": no program for {type(pattern).__name__}')
