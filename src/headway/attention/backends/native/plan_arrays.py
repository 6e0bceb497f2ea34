"""The tokens, plan and program of a call as arrays of the C interface: everything the kernels read besides the
tensors."""

import ctypes
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.attention.plan import BlockOrder, plan
from headway.errors import BackendError
from headway.native import interface as c
from headway.patterns import Pattern
from headway.patterns.primitives import Kind, Primitive
from headway.patterns.program import TokensMemo, lower
from headway.tokens import Tokens

FAR = 2**30
"""Limit of indices, so that the difference of two fits into 32 bits; a window that reaches further is unbounded."""

FEW = 16
"""Most queries for which keys are read in the order of their slots: sorting them would cost more than it saves."""


@dataclass(frozen=True, eq=False)
class PlanArrays:
    """Tokens, plan and program of one key set of a call, and the arrays that they point into."""

    queries: c.TokensStruct
    keys: c.TokensStruct
    plan: c.PlanStruct
    program: ctypes.Array[ctypes.c_int32]
    arrays: tuple[object, ...]


def _build(pattern: Pattern, q: Tokens, k: Tokens, in_order: bool) -> PlanArrays:
    """Builds the arrays of one key set; with `in_order` its keys keep the order of their slots. Raises BackendError
    for indices of 2^30 or more."""
    arrays: list[object] = []

    def tensor(t: Tensor | None, dtype: torch.dtype = torch.int32) -> int | None:
        if t is None:
            return None
        copy = t.to(dtype).contiguous()
        arrays.append(copy)
        return copy.data_ptr()

    def numbers(kind: str, values: Iterable[int]) -> int:
        data = array(kind, values)
        arrays.append(data)
        return data.buffer_info()[0]

    def side(tokens: Tokens, order: Tensor | None) -> c.TokensStruct:
        rows = tokens.rows
        t = tokens.expand(rows)
        at = None if order is None else order.expand(rows, -1)
        globals_ = tensor(t.is_global, torch.uint8)
        return c.TokensStruct(tensor(t.index), tensor(t.document), globals_, tensor(at), rows, t.count)

    for tokens in (q, k):
        if tokens.count and int(tokens.index.max()) >= FAR:
            raise BackendError(
                f'backend="native": token index {int(tokens.index.max())} is not below 2^30, the limit of its kernels; '
                'use backend="banded"'
            )
    q, k = _small_documents(q, k)
    at_q, k_order, rows = BlockOrder(q, pattern.dilation), None, max(q.rows, k.rows)
    if q.count > FEW and not in_order:
        at_k = BlockOrder(k, pattern.dilation)
        k, k_order = at_k.tokens, at_k.order
    q = at_q.tokens
    blocks = plan(pattern, q, k, c.TILE, c.BLOCK, apart=True)
    runs = c.PlanStruct(
        numbers("i", blocks.first),
        numbers("i", blocks.begin),
        numbers("i", blocks.end),
        numbers("B", blocks.full),
        rows,
        -(-q.count // c.TILE),
        c.TILE,
    )
    instructions = program(pattern)
    return PlanArrays(
        side(q, at_q.order),
        side(k, k_order),
        runs,
        (ctypes.c_int32 * len(instructions))(*instructions),
        tuple(arrays),
    )


plan_arrays = TokensMemo(_build)


def _small_documents(q: Tokens, k: Tokens) -> tuple[Tokens, Tokens]:
    """Returns the same tokens, with document numbers that fit into 32 bits."""
    sides = [t for t in (q, k) if t.document is not None and t.document.numel()]
    if all(int(t.document.abs().max()) < FAR for t in sides if t.document is not None):
        return q, k
    rows = max(q.rows, k.rows)
    documents = torch.cat((q.documents.expand(rows, -1), k.documents.expand(rows, -1)), 1)
    small = documents.unique(return_inverse=True)[1].view_as(documents).split((q.count, k.count), 1)
    q, k = (
        Tokens(t.index.expand(rows, -1), d, None if t.is_global is None else t.is_global.expand(rows, -1))
        for t, d in zip((q, k), small, strict=True)
    )
    return q, k


def program(pattern: Pattern) -> list[int]:
    """Returns the program of a pattern for the stack machine of the kernels, four numbers for each instruction."""
    return [number for item in lower(pattern) for number in _instruction(item)]


def _instruction(p: Primitive) -> tuple[int, int, int, int]:
    first, last, step = (max(-FAR, min(FAR, n)) for n in (p.first, p.last, p.step))
    return (p.kind, last, 0, 0) if p.kind in (Kind.SINK, Kind.CHUNK) else (p.kind, first, last, step)
