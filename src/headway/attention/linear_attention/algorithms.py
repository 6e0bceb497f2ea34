"""Two ways to compute the same numerators and denominators.

Legend: B rows, K kv heads, G query heads per kv head, T queries, S keys, F features, E per value.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.attention.linear_attention.scan import scan
from headway.attention.linear_attention.state import LinearState

SIZE = 64
"""Slots of a block of the chunked form. It does not change the result; docs/linear.md says how this value was found."""


@dataclass(frozen=True, eq=False)
class Sums:
    """The terms of the sums, in order (`token_order.Order`), with zeros in empty slots.

    q, zq           features for numerator and denominator     [B, K, G, T, F]
    k, zk           the same of keys, 0 in empty slots            [B, K, S, F]
    v               values, 0 in empty slots                      [B, K, S, E]
    q_documents, k_documents   [B|1, T] and [B|1, S]; both None if there is one document
    past            the state before all of these tokens (causal)
    causal          whether query i sees keys 0..i of its document, or all of it
    """

    q: Tensor
    k: Tensor
    v: Tensor
    zq: Tensor
    zk: Tensor
    q_documents: Tensor | None
    k_documents: Tensor | None
    past: LinearState | None
    causal: bool


Result = tuple[Tensor, Tensor]


def parallel(at: Sums) -> Result:
    """Computes all products of queries and keys: the specification. O(T S) time and memory; derivatives of any
    order. For one query after a past it is a step of the recurrence: q S + (q . k) v (Katharopoulos et al. 2020,
    equations 16 to 20)."""
    weights, den = products(at)
    num = weights @ at.v.unsqueeze(2)
    if at.past is not None:
        num = num + at.q @ at.past.kv.unsqueeze(2)
        den = den + (at.zq @ at.past.k[:, :, None, :, None]).squeeze(-1)
    return num, den


def products(at: Sums) -> Result:
    """Returns (q_i . k_j [B, K, G, T, S], 0 where j is not seen; sum_j zq_i . zk_j [B, K, G, T])."""
    q, z = (a @ b.mT.unsqueeze(2) for a, b in ((at.q, at.k), (at.zq, at.zk)))
    if at.causal:
        q, z = q.tril(), z.tril()
    if at.q_documents is not None and at.k_documents is not None:
        same = (at.q_documents[:, :, None] == at.k_documents[:, None, :])[:, None, None]
        q, z = q * same, z * same
    return q, z.sum(-1)


def chunked(at: Sums, size: int = SIZE) -> Result:
    """Computes the sums in O(T F E) time and O(T) memory, also with the backward.

    Causal: block by block, with products inside a block and sums over what came before it (`scan`); in blocks of one
    slot it is the recurrence. Bidirectional: one state for each document, read by all its queries."""
    return _running(at, size) if at.causal else _whole(at)


def _running(at: Sums, size: int) -> Result:
    b, kv_heads, group, count, features = at.q.shape
    n, value_dim = b * kv_heads, at.v.shape[-1]
    past = at.past or LinearState.empty(b, kv_heads, features, value_dim, at.v.dtype, at.v.device)
    documents = at.k_documents
    if documents is not None and documents.shape[0] > 1:
        documents = documents.repeat_interleave(kv_heads, 0)
    q, k, v, zq, zk = (t.flatten(0, 1) for t in (at.q, at.k, at.v, at.zq, at.zk))
    kv, z = past.kv.reshape(n, features, value_dim), past.k.reshape(n, features)
    num, den = scan(q, k, v, zq, zk, documents, kv, z, size)
    return num.view(b, kv_heads, group, count, value_dim), den.view(b, kv_heads, group, count)


def _whole(at: Sums) -> Result:
    if at.q_documents is None or at.k_documents is None:
        return _read(at.q, at.zq, at.k.mT @ at.v, at.zk.sum(2))
    rows = max(at.q_documents.shape[0], at.k_documents.shape[0])
    queries, keys = (t.expand(rows, -1) for t in (at.q_documents, at.k_documents))
    tensors = (at.q, at.zq, at.k, at.zk, at.v)
    by_row = [tensors] if rows == 1 else list(zip(*(t.split(1) for t in tensors), strict=True))
    parts = [_by_document(queries[b], keys[b], *by_row[b]) for b in range(rows)]
    num, den = (torch.cat(list(same)) for same in zip(*parts, strict=True))
    return num, den


def _by_document(
    queries: Tensor, keys: Tensor, q: Tensor, zq: Tensor, k: Tensor, zk: Tensor, v: Tensor
) -> Result:
    """Computes the bidirectional sums of documents [T] and [S] that are runs of slots, the same in every row."""
    names, counts = _runs(keys)
    states = {
        name: (a.mT @ c, z.sum(2))
        for name, a, z, c in zip(names, *(t.split(counts, 2) for t in (k, zk, v)), strict=True)
    }
    shape = (*k.shape[:2], k.shape[3])
    empty = (k.new_zeros(*shape, v.shape[3]), k.new_zeros(shape))
    names, counts = _runs(queries)
    parts = [
        _read(a, z, *states.get(name, empty))
        for name, a, z in zip(names, q.split(counts, 3), zq.split(counts, 3), strict=True)
    ]
    if not parts:
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_zeros(q.shape[:-1])
    num, den = (torch.cat(list(same), 3) for same in zip(*parts, strict=True))
    return num, den


def _runs(documents: Tensor) -> tuple[list[int], list[int]]:
    names, counts = documents.unique_consecutive(return_counts=True)
    return names.tolist(), counts.tolist()


def _read(q: Tensor, zq: Tensor, kv: Tensor, z: Tensor) -> Result:
    """Returns numerators and denominators of queries [B, K, G, T, F] from sums kv [B, K, F, E] and z [B, K, F]."""
    return q @ kv.unsqueeze(2), (zq @ z[:, :, None, :, None]).squeeze(-1)


FORMS: dict[str, Callable[[Sums], Result]] = {"parallel": parallel, "chunked": chunked}
