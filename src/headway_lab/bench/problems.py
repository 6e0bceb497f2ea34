"""From a case to its sides: the same work, done by headway and by each peer, ready to be called.

Legend: H query heads, K kv heads, S cached keys, D per head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.attention import KeyValues, attend
from headway.patterns import Causal
from headway.quantization import dequantize
from headway.tokens import Tokens
from headway_lab.bench.cases import Case, named
from headway_lab.bench.inputs import (
    OURS,
    Call,
    Inputs,
    Problem,
    Side,
    UnsupportedCase,
    fastest,
    make,
    without_gradient,
)
from headway_lab.bench.peers import PEERS

COLD_BYTES = 256 << 20
"""Caches that take turns in decoding hold this much, so that none is still in the processor's own cache."""
MOST_CACHES = 32

Step = Callable[[KeyValues], Tensor]


def build(case: Case, dtype: str, direction: str, backend: str = "auto") -> Problem:
    """The sides of one row. Raises BackendError where `backend` cannot run it."""
    if case.kind == "decode":
        return decode(case, dtype, backend)
    return attention(case, dtype, direction, backend)


def attention(case: Case, dtype: str, direction: str, backend: str) -> Problem:
    """headway and the case's peers on the same q, k, v, and the case that it is compared with."""
    at = make(case, dtype, direction)
    problem = Problem({OURS: at.run(headway(at, backend))}, at.flops)
    for name in case.peers:
        try:
            problem.sides[name] = at.run(PEERS[name](at))
        except UnsupportedCase as why:
            problem.notes.append(f"{name}: {why}")
    if case.against is not None:
        other = make(named(case.against).at(case.tokens), dtype, direction)
        name = f"{OURS} {case.against}"
        problem.sides[name] = other.run(headway(other, backend))
        problem.unrelated |= {name}
        if case.per_pair:
            problem.scale[name] = at.flops / other.flops
    return problem


def headway(at: Inputs, backend: str) -> Call:
    """`attend` as a user calls it."""
    pattern, tokens = at.case.pattern, None if at.plain else at.tokens
    return lambda: attend(at.q, at.k, at.v, pattern, q_tokens=tokens, k_tokens=tokens, backend=backend)


def decode(case: Case, dtype: str, backend: str) -> Problem:
    """One query over a long cache, read from memory; work is the bytes of keys, values and scales that headway reads.

    Every call of a side takes the next of several caches. In a case of int8, headway and "dequantized" read
    int8; all others read the numbers that these represent, rounded to `dtype` beforehand."""
    kind, noise = getattr(torch, dtype), torch.Generator().manual_seed(0)
    past, width, int8 = case.tokens, case.width, case.kv_dtype == "int8"
    q = torch.empty(1, case.heads, 1, width, dtype=kind).normal_(generator=noise)
    last, all_keys = Tokens.range(1, start=past - 1), Tokens.range(past)

    def cache() -> KeyValues:
        k, v = (torch.empty(1, case.kv_heads, past, width, dtype=kind).normal_(generator=noise) for _ in "kv")
        return KeyValues(k, v, all_keys).quantized() if int8 else KeyValues(k, v, all_keys)

    first = cache()
    read = sum(t.nbytes for t in first.tensors)
    caches = [first, *(cache() for _ in range(max(2, min(MOST_CACHES, -(-COLD_BYTES // read))) - 1))]
    plain = [part.dequantized(kind) for part in caches]
    rows = q.view(case.kv_heads, case.heads // case.kv_heads, width)
    scaled = rows * width**-0.5

    def ours(part: KeyValues) -> Tensor:
        return attend(
            q,
            part.k,
            part.v,
            Causal(),
            q_tokens=last,
            k_tokens=all_keys,
            backend=backend,
            k_scale=part.k_scale,
            v_scale=part.v_scale,
        )

    def gqa(part: KeyValues) -> Tensor:
        return F.scaled_dot_product_attention(q, part.k, part.v, enable_gqa=True)

    def rows_sdpa(part: KeyValues) -> Tensor:
        return F.scaled_dot_product_attention(rows.unsqueeze(0), part.k, part.v).view_as(q)

    def rows_first(part: KeyValues) -> Tensor:
        return weighted(scaled @ part.k[0].transpose(1, 2), part)

    def keys_first(part: KeyValues) -> Tensor:
        return weighted((part.k[0] @ scaled.transpose(1, 2)).transpose(1, 2), part)

    def weighted(scores: Tensor, part: KeyValues) -> Tensor:
        return (torch.softmax(scores, -1, dtype=torch.float32).to(kind) @ part.v[0]).view_as(q)

    def dequantized(how: Callable[[Tensor, Tensor], Tensor]) -> Step:
        def step(part: KeyValues) -> Tensor:
            k, v, k_scale, v_scale = part.tensors
            return rows_sdpa(KeyValues(how(k, k_scale), how(v, v_scale), part.tokens))

        return step

    def turns(step: Step, over: Sequence[KeyValues]) -> Side:
        endless = itertools.cycle(over)
        return without_gradient(lambda: step(next(endless)))

    rounded_once = dequantized(lambda t, scale: dequantize(t, scale, kind))
    rounded_twice = dequantized(lambda t, scale: t.to(kind).mul_(scale.to(kind).unsqueeze(-1)))
    ways: dict[str, tuple[list[Step], list[KeyValues]]] = {
        "rows": ([rows_first, keys_first], plain),
        "rows-sdpa": ([rows_sdpa], plain),
        "gqa": ([gqa], plain),
        "dequantized": ([rounded_once, rounded_twice], caches),
    }
    problem = Problem({OURS: turns(ours, caches)}, float(read), "reads")
    for name in case.peers:
        steps, over = ways[name]
        problem.sides[name] = turns(fastest(steps, partial(turns, over=over)), over)
    if case.against is not None:
        problem.sides[f"{OURS} {case.against}"] = turns(ours, plain)
    return problem
