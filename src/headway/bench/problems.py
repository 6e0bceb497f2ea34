"""From a case to its sides: the same work, done by headway and by each peer, ready to be called.

Legend: H query heads, K kv heads, G heads per kv head, S cached keys, D per head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.attention import attend
from headway.bench.cases import Case, named
from headway.bench.inputs import Inputs, make
from headway.bench.layers import longformer_sides, mistral_sides
from headway.bench.peers import PEERS, Unfit, quickest
from headway.patterns import Causal
from headway.tokens import Tokens

OURS = "headway"
COLD_BYTES = 256 << 20
"""Caches that take turns in decoding hold this much, so that none is still in the processor's own cache."""
MOST_CACHES = 32


@dataclass
class Problem:
    """What one row of the bench times.

    sides    name -> call, headway's under OURS; a call returns outputs (and gradients)
    work     useful FLOPs of a call, or bytes where memory bounds it (`bound`)
    scale    factor on a side's time, where it did another amount of work
    unlike   sides that solve another problem: their outputs are not compared
    notes    peers left out, and why
    """

    sides: dict[str, Callable[[], Sequence[Tensor]]]
    work: float
    bound: str = "products"
    scale: dict[str, float] = field(default_factory=dict)
    unlike: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)


def build(case: Case, dtype: str, direction: str, backend: str = "auto") -> Problem:
    """The sides of one row. Raises BackendError where `backend` cannot run it."""
    makers = {
        "attention": attention,
        "decode": decode,
        "longformer": longformer,
        "longformer-core": longformer,
        "mistral": mistral,
    }
    return makers[case.kind](case, dtype, direction, backend)


def attention(case: Case, dtype: str, direction: str, backend: str) -> Problem:
    """headway and the case's peers on the same q, k, v, and the case it is set against beside them."""
    at = make(case, dtype, direction)
    problem = Problem({OURS: at.run(headway(at, backend))}, at.flops)
    for name in case.peers:
        if at.backward and not PEERS[name].backward:
            continue
        try:
            problem.sides[name] = at.run(PEERS[name].build(at))
        except Unfit as why:
            problem.notes.append(f"{name}: {why}")
    if case.against is not None:
        other = make(named(case.against).at(case.tokens), dtype, direction)
        name = f"{OURS} {case.against}"
        problem.sides[name] = other.run(headway(other, backend))
        problem.unlike |= {name}
        if case.per_pair:
            problem.scale[name] = at.flops / other.flops
    return problem


def headway(at: Inputs, backend: str) -> Callable[[], Tensor]:
    """`attend` as a user calls it."""
    pattern, tokens = at.case.pattern, None if at.plain else at.tokens
    return lambda: attend(at.q, at.k, at.v, pattern, q_tokens=tokens, k_tokens=tokens, backend=backend)


def decode(case: Case, dtype: str, direction: str, backend: str) -> Problem:
    """One query over a long cache, read from memory: every call of a side takes the next of several caches."""
    kind, noise = getattr(torch, dtype), torch.Generator().manual_seed(0)
    heads, kv_heads, past, width = case.heads, case.kv_heads, case.tokens, case.width
    group = heads // kv_heads
    one = 2 * kv_heads * past * width * kind.itemsize
    count = max(2, min(MOST_CACHES, -(-COLD_BYTES // one)))
    q = torch.empty(1, heads, 1, width, dtype=kind).normal_(generator=noise)
    shape = (1, kv_heads, past, width)
    caches = [
        tuple(torch.empty(shape, dtype=kind).normal_(generator=noise) for _ in range(2)) for _ in range(count)
    ]
    last, all_keys = Tokens.range(1, start=past - 1), Tokens.range(past)
    rows = q.view(kv_heads, group, width)
    scaled = rows * width**-0.5

    def ours(k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, Causal(), q_tokens=last, k_tokens=all_keys, backend=backend)

    def gqa(k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def rows_sdpa(k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(rows.unsqueeze(0), k, v).view_as(q)

    def rows_first(k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(scaled @ k[0].transpose(1, 2), -1, dtype=torch.float32).to(kind)
        return (weights @ v[0]).view_as(q)

    def keys_first(k: Tensor, v: Tensor) -> Tensor:
        scores = (k[0] @ scaled.transpose(1, 2)).transpose(1, 2)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(kind)
        return (weights @ v[0]).view_as(q)

    def turns(step: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Sequence[Tensor]]:
        endless = itertools.cycle(caches)

        def call() -> Sequence[Tensor]:
            with torch.no_grad():
                return (step(*next(endless)),)

        return call

    rows_matmul = quickest([rows_first, keys_first], turns)
    sides = {OURS: turns(ours), "rows": turns(rows_matmul), "rows-sdpa": turns(rows_sdpa), "gqa": turns(gqa)}
    return Problem({name: sides[name] for name in (OURS, *case.peers)}, float(one), "reads")


def longformer(case: Case, dtype: str, direction: str, backend: str) -> Problem:
    """A layer of transformers' Longformer, or its attention alone."""
    ours, theirs, flops = longformer_sides(case, getattr(torch, dtype), backend)
    return Problem({OURS: ours, "transformers": theirs}, flops)


def mistral(case: Case, dtype: str, direction: str, backend: str) -> Problem:
    """A training step of transformers' Mistral, with our attention and with torch's."""
    sides, flops = mistral_sides(case, getattr(torch, dtype))
    problem = Problem({OURS: sides["headway"], "transformers": sides["sdpa"]}, flops)
    if backend != "auto":
        problem.notes.append(f"backend {backend!r} is not asked for there: models of transformers take auto")
    return problem
