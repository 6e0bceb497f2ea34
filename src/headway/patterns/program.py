"""Lowers patterns: the one place that takes patterns apart, for everything that evaluates them in its own way.

Leaves state their primitive (`Pattern.primitive`); & and | join the values of their parts.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import chain, product
from typing import Generic, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from headway.patterns.base import And, Bounds, Or, Pattern, PerHead
from headway.patterns.leaves import FARTHEST, Causal, Chunk, Full, GlobalKeys, GlobalQueries, Sink, Window
from headway.patterns.primitives import Kind, Primitive
from headway.patterns.tiles import Extent
from headway.tokens import Tokens

FULL, CAUSAL, NOTHING = Full(), Causal(), Sink(0)

Value = TypeVar("Value")
More = TypeVarTuple("More")
Join = Callable[[Sequence[Value]], Value]

Program = tuple[Primitive, ...]
"""A pattern as a postfix program for a stack machine: primitives push, AND and OR join the two topmost values.
Causal() & Window.last(4) | Sink(1) is CAUSAL, WINDOW, AND, SINK, OR."""

Terms = tuple[tuple[Primitive, ...], ...]
"""A pattern in disjunctive normal form: some term holds; a term holds if all its primitives do."""


def leaves(pattern: Pattern) -> tuple[Pattern, ...]:
    """Returns the leaves of every head of the pattern, from left to right."""
    if isinstance(pattern, And | Or | PerHead):
        return tuple(leaf for part in pattern.parts for leaf in leaves(part))
    return (pattern,)


def fold(pattern: Pattern, leaf: Callable[[Pattern], Value], every: Join[Value], some: Join[Value]) -> Value:
    """Returns the values of `leaf` for all leaves, combined by `every` under & and by `some` under |."""
    if isinstance(pattern, And | Or):
        parts = [fold(part, leaf, every, some) for part in pattern.parts]
        return every(parts) if isinstance(pattern, And) else some(parts)
    assert not isinstance(pattern, PerHead), "take PerHead apart first: every head has a program of its own"
    return leaf(pattern)


# -- programs ------------------------------------------------------------------------------------------------


def opaque(pattern: Pattern) -> Pattern | None:
    """Returns the first leaf without a primitive, which has only `allows` and `judge`; None if every leaf has one."""
    return next((leaf for leaf in leaves(pattern) if leaf.primitive is None), None)


def primitive(leaf: Pattern) -> Primitive:
    """Returns the primitive of a leaf that has one."""
    p = leaf.primitive
    assert p is not None, f"{leaf} has no primitive: ask opaque() before"
    return p


def primitives(pattern: Pattern) -> list[Primitive]:
    """Returns the primitives of all leaves that have one."""
    return [leaf.primitive for leaf in leaves(pattern) if leaf.primitive is not None]


def lower(pattern: Pattern) -> Program:
    """Returns the program of a pattern without opaque leaves."""
    return _lower(pattern) if torch.compiler.is_compiling() else _lowered(pattern)


def _join(kind: Kind) -> Join[Program]:
    return lambda parts: parts[0] + tuple(p for part in parts[1:] for p in (*part, Primitive(kind)))


def _lower(pattern: Pattern) -> Program:
    return fold(pattern, lambda leaf: (primitive(leaf),), _join(Kind.AND), _join(Kind.OR))


_lowered = lru_cache(maxsize=512)(_lower)


def height(program: Program) -> int:
    """Returns the stack size that a program needs."""
    depth = [0]
    for item in program:
        depth.append(depth[-1] + (-1 if item.kind in (Kind.AND, Kind.OR) else 1))
    return max(depth)


def terms(pattern: Pattern) -> Terms:
    """Returns a pattern without opaque leaves in disjunctive normal form."""
    return fold(
        pattern,
        lambda leaf: ((primitive(leaf),),),
        lambda parts: tuple(tuple(dict.fromkeys(chain(*factors))) for factors in product(*parts)),
        lambda parts: tuple(dict.fromkeys(chain(*parts))),
    )


# -- plainer patterns -----------------------------------------------------------------------------------------


def mapped(pattern: Pattern, change: Callable[[Pattern], Pattern]) -> Pattern:
    """Returns the pattern with changed leaves, without parts that then always hold (under &) or never hold (under
    |)."""
    if isinstance(pattern, PerHead):
        return PerHead(*(mapped(part, change) for part in pattern.parts))
    if not isinstance(pattern, And | Or):
        return change(pattern)
    parts = dict.fromkeys(mapped(part, change) for part in pattern.parts)
    idle, decisive = (FULL, NOTHING) if isinstance(pattern, And) else (NOTHING, FULL)
    if decisive in parts:
        return decisive
    remaining = tuple(part for part in parts if part != idle)
    return type(pattern)(remaining) if len(remaining) > 1 else remaining[0] if remaining else idle


STANDARD: dict[Kind, Callable[[Primitive], Pattern]] = {
    Kind.FULL: lambda p: FULL,
    Kind.CAUSAL: lambda p: CAUSAL,
    Kind.WINDOW: lambda p: Window(-p.first // p.step, p.last // p.step, p.step),
    Kind.SINK: lambda p: Sink(p.last),
    Kind.CHUNK: lambda p: Chunk(p.last),
    Kind.GLOBAL_KEYS: lambda p: GlobalKeys(),
    Kind.GLOBAL_QUERIES: lambda p: GlobalQueries(),
}
"""The leaves of `leaves.py` by the kind of their primitive."""


def standard(leaf: Pattern) -> Pattern:
    """Returns the leaf of `leaves.py` with the same primitive; the leaf itself if it has none."""
    return leaf if leaf.primitive is None else STANDARD[leaf.primitive.kind](leaf.primitive)


def simplify(pattern: Pattern, q: Tokens, k: Tokens) -> Pattern:
    """Returns the simplest pattern that allows the same pairs of these tokens.

    Leaves are replaced by the standard ones. Parts of & that always hold and parts of | that never hold are dropped; a
    window that reaches beyond the first key becomes Causal. So a window of 512 over 300 tokens runs as Causal.
    """
    if not q.count or not k.count:
        return pattern
    if q.static_key is not None and k.static_key is not None and opaque(pattern) is None:
        at_q, at_k = Extent.whole(*q.static_key), Extent.whole(*k.static_key)
    else:
        at_q, at_k = Extent.of(q, q.count), Extent.of(k, k.count)

    def plainest(leaf: Pattern) -> Pattern:
        leaf = standard(leaf)
        possible, certain = leaf.judge(at_q, at_k)
        if _every(certain):
            return FULL
        if not _some(possible):
            return NOTHING
        if isinstance(leaf, Window) and leaf.step == 1 and leaf.after == 0:
            return CAUSAL if _every(Window(leaf.before, FARTHEST).judge(at_q, at_k)[1]) else leaf
        return leaf

    return mapped(pattern, plainest)


def _every(judged: Tensor | bool) -> bool:
    return bool(judged.all()) if isinstance(judged, Tensor) else judged


def _some(judged: Tensor | bool) -> bool:
    return bool(judged.any()) if isinstance(judged, Tensor) else judged


# -- functions of a pattern and the tokens of both sides, computed once ----------------------------------------

OTHERS = 8
"""Maximum number of values stored per token object of the queries, for tokens without a static key."""


class TokensMemo(Generic[Value, *More]):
    """Memoizes `make(pattern, q, k, ...)`.

    The key is `Tokens.static_key` and the shape if it determines the tokens; otherwise the token objects, as long as
    they live unchanged, so that all layers of a model, and forward and backward, share one value. Nothing is memoized
    in a traced graph. At most `most` values with static keys are stored; when they are exceeded, all are dropped.
    """

    def __init__(self, make: Callable[[Pattern, Tokens, Tokens, *More], Value], most: int = 64) -> None:
        self._make, self._most = make, most
        self._static: dict[Hashable, tuple[Hashable, Value]] = {}
        self.others: WeakKeyDictionary[Tokens, dict[Hashable, tuple[Hashable, Value]]] = WeakKeyDictionary()

    def __call__(self, pattern: Pattern, q: Tokens, k: Tokens, *more: *More) -> Value:
        if torch.compiler.is_compiling():
            return self._make(pattern, q, k, *more)
        key: Hashable = (pattern, q.static_key, k.static_key, q.index.shape, k.index.shape, q.device, more)
        versions: tuple[Hashable, Hashable] = ((), ())
        known, most = self._static, self._most
        if q.static_key is None or k.static_key is None:
            key, versions = (pattern, ref(k), more), (q.versions, k.versions)
            known, most = self.others.setdefault(q, {}), OTHERS
        entry = known.get(key)
        if entry is not None and entry[0] == versions:
            return entry[1]
        with torch.inference_mode(False):
            value = self._make(pattern, q, k, *more)
        if None not in versions:
            if len(known) >= most:
                known.clear()
            known[key] = versions, value
        return value


simplified = TokensMemo(simplify, most=512)
"""`simplify`, memoized."""


# -- questions about patterns ---------------------------------------------------------------------------------


def kinds(pattern: Pattern) -> set[Kind]:
    """Returns the kinds of the primitives in a pattern."""
    return {p.kind for p in primitives(pattern)}


def sinks(pattern: Pattern) -> int:
    """Returns the largest number of first tokens that a Sink in the pattern allows."""
    return max((p.last for p in primitives(pattern) if p.kind == Kind.SINK), default=0)


def chunks(pattern: Pattern) -> set[int]:
    """Returns the sizes of the chunks in a pattern."""
    return {p.last for p in primitives(pattern) if p.kind == Kind.CHUNK}


def without(pattern: Pattern, *gone: Kind) -> Pattern:
    """Returns the pattern with primitives of these kinds replaced by nothing."""
    return mapped(pattern, lambda leaf: NOTHING if kinds(leaf) & {*gone} else leaf)


def interval(pattern: Pattern) -> Bounds | None:
    """Returns (before, after) if a query sees exactly the keys within these distances: for Full(), Causal() and
    windows without dilation (all of which contain distance 0), joined by & and |. None for any other pattern, and
    for `PerHead`, whose heads may differ."""
    if isinstance(pattern, PerHead) or opaque(pattern) is not None:
        return None
    plain = (Kind.FULL, Kind.CAUSAL, Kind.WINDOW)
    return pattern.reach if all(p.kind in plain and p.step == 1 for p in primitives(pattern)) else None


def reads_globals(pattern: Pattern) -> bool:
    """Returns whether a pattern depends on which tokens are global, as far as its retention and primitives state it."""
    return pattern.retention.globals or bool(kinds(pattern) & {Kind.GLOBAL_KEYS, Kind.GLOBAL_QUERIES})
