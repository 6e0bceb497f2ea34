"""Programs: a lowered pattern allows the same pairs as the pattern."""

import operator
from functools import reduce

import pytest
import torch
from hypothesis import given
from torch import Tensor

from headway.patterns import Causal, Full, GlobalKeys, GlobalQueries, Pattern, PerHead, Sink, Window, parse
from headway.patterns.primitives import Kind
from headway.patterns.program import (
    Program,
    fold,
    height,
    interval,
    kinds,
    leaves,
    lower,
    mapped,
    reads_globals,
    sinks,
    standard,
    without,
)
from headway.tokens import Tokens
from tests.strategies import patterns, tokens


def run(program: Program, q: Tokens, k: Tokens) -> Tensor:
    """Evaluates a program like the stack machine of csrc/mask.h, on tensors."""
    i, j = q.index.unsqueeze(-1), k.index.unsqueeze(-2)
    stack: list[Tensor] = []
    for kind, first, last, step in program:
        if kind in (Kind.AND, Kind.OR):
            join = operator.and_ if kind == Kind.AND else operator.or_
            stack.append(join(stack.pop(), stack.pop()))
            continue
        allowed = {
            Kind.FULL: (i == i) & (j == j),
            Kind.CAUSAL: j <= i,
            Kind.WINDOW: (first <= j - i) & (j - i <= last) & ((j - i) % step == 0),
            Kind.SINK: (j < last) & (i == i),
            Kind.CHUNK: j // max(last, 1) == i // max(last, 1),
            Kind.GLOBAL_KEYS: k.globals.unsqueeze(-2) & (i == i),
            Kind.GLOBAL_QUERIES: q.globals.unsqueeze(-1) & (j == j),
        }
        stack.append(allowed[kind])
        assert len(stack) <= height(program)
    (result,) = stack
    return result


@given(patterns, tokens(), tokens())
def test_a_program_is_its_pattern(pattern: Pattern, q: Tokens, k: Tokens) -> None:
    if min(q.rows, k.rows) in (1, max(q.rows, k.rows)):
        allowed = pattern.allows(q, k)
        assert torch.equal(*torch.broadcast_tensors(run(lower(pattern), q, k), allowed))


@given(patterns, tokens(), tokens())
def test_folding_the_truth_of_leaves_is_the_truth(pattern: Pattern, q: Tokens, k: Tokens) -> None:
    if min(q.rows, k.rows) in (1, max(q.rows, k.rows)):
        folded = fold(
            pattern,
            lambda leaf: leaf.allows(q, k),
            lambda parts: reduce(torch.logical_and, parts),
            lambda parts: reduce(torch.logical_or, parts),
        )
        assert torch.equal(folded, pattern.allows(q, k))


@given(patterns)
def test_a_leaf_is_the_standard_one_of_its_primitive(pattern: Pattern) -> None:
    for leaf in leaves(pattern):
        assert standard(leaf) == leaf


@given(patterns, tokens(), tokens())
def test_leaving_out_what_decides_nothing_changes_nothing(pattern: Pattern, q: Tokens, k: Tokens) -> None:
    if min(q.rows, k.rows) in (1, max(q.rows, k.rows)):
        plain = mapped(pattern, standard)
        real = q.valid.unsqueeze(-1) & k.valid.unsqueeze(-2)  # results at empty slots are unspecified
        assert torch.equal(plain.allows(q, k) & real, pattern.allows(q, k) & real)


def test_what_is_left_without_kinds() -> None:
    both = Window.around(3) | GlobalKeys() | GlobalQueries()
    assert without(both, Kind.GLOBAL_QUERIES) == Window.around(3) | GlobalKeys()
    assert without(both & Causal(), Kind.GLOBAL_KEYS, Kind.GLOBAL_QUERIES) == Window.around(3) & Causal()
    assert without(Window.last(2) | Causal() & Sink(4), Kind.SINK) == Window.last(2)
    assert without(PerHead(both, Causal()), Kind.WINDOW) == PerHead(GlobalKeys() | GlobalQueries(), Causal())
    assert without(GlobalQueries(), Kind.GLOBAL_QUERIES) == Sink(0)


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("Full", (None, None)),
        ("Causal", (None, 0)),
        ("Window.last(5) & Causal", (4, 0)),
        ("Window.around(3) | Causal", (None, 3)),
        ("Window(2, 9) & Window(5, 1)", (2, 1)),
        ("Window.last(5, step=2)", None),
        ("Window.last(5) | Sink(2)", None),
    ],
)
def test_the_interval_of_a_pattern(text: str, bounds: tuple[int | None, int | None] | None) -> None:
    pattern = parse(text)
    assert interval(pattern) == bounds
    if bounds is not None:
        at = Tokens.range(14)
        distance = at.index.unsqueeze(-2) - at.index.unsqueeze(-1)
        before, after = (20 if n is None else n for n in bounds)
        seen = pattern.allows(at, at)
        assert torch.equal(seen, ((distance >= -before) & (distance <= after)).expand_as(seen))


def test_what_is_asked_of_patterns() -> None:
    pattern = PerHead(Window.last(3) | Sink(2), Sink(5) & Causal() | GlobalKeys())
    assert kinds(pattern) == {Kind.WINDOW, Kind.SINK, Kind.CAUSAL, Kind.GLOBAL_KEYS}
    assert sinks(pattern) == 5
    assert sinks(Full()) == 0
    assert reads_globals(pattern)
    assert not reads_globals(Causal() | Sink(3))
