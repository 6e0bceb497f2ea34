"""From a case to its sides: the same work, done by headway and by each peer, ready to be called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.attention import attend
from headway_lab.bench.cases import Case, named
from headway_lab.bench.decoding import decode_sides
from headway_lab.bench.inputs import Inputs, make
from headway_lab.bench.layers import longformer_sides, mistral_sides
from headway_lab.bench.peers import PEERS, Unfit

OURS = "headway"


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
    """One query over a long cache, read from memory."""
    sides, read = decode_sides(case, dtype, backend)
    return Problem(sides, read, "reads")


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
