"""Numbers and pictures of a pattern alone: how many pairs it allows, the fates of keys, and its drawing."""

from collections.abc import Sequence
from itertools import combinations, pairwise, product
from math import lcm

import torch
from torch import Tensor

from headway.errors import PatternError
from headway.patterns.base import Pattern, classify, visible
from headway.patterns.primitives import Kind, Primitive
from headway.patterns.program import FULL, NOTHING, chunks, fold, leaves, mapped, opaque, primitive
from headway.tokens import Tokens

MOST = 2**17
"""Tokens of a row whose pairs are looked at one by one, where a pattern says no more than `allows`."""
FATES = ("later", "released", "kept", "seen")
"""The fates of keys: yet to come, released, kept for later queries, or seen."""


def pairs(
    pattern: Pattern,
    n: int,
    *,
    heads: int = 1,
    tokens: Tokens | None = None,
    last: int | None = None,
    tile: int = 64,
) -> int:
    """Allowed (query, key) pairs of an n x n call of `heads` query heads (`PerHead`: of its own), or of its `last`
    queries alone: exact.

    Without `tokens`, which say which are global, that is arithmetic at any n. With them, and for a pattern that has no
    primitive or chunks of several sizes, blocks of `tile` that it rules in or out as a whole are counted as areas, and
    the predicate is evaluated on the others only, so that nothing of size n x n is built.

    Raises PatternError for tokens of another number, for `last` queries of given tokens, and for more than `MOST`
    tokens where they would have to be looked at."""
    if tokens is not None and (tokens.count != n or last is not None):
        what = f"n is {n}" if last is None else f"the last {last} queries of given tokens are not counted"
        raise PatternError(f"pairs: tokens describe {tokens.count} slots, but {what}")
    count = heads if len(pattern.heads) == 1 else 1
    last = n if last is None else min(last, n)
    return count * sum(
        _by_chunks(head, n, last)
        if tokens is None and opaque(head) is None and len(chunks(head)) < 2
        else _seen(head, n, last, tokens, tile)
        for head in pattern.heads
    )


def _by_chunks(pattern: Pattern, n: int, last: int) -> int:
    """`pairs` of the `last` of n queries, none global, from the primitives, of which those of chunks have one size.

    Chunks are Full within one, and nothing between two: pairs are counted as if there was nothing, and within each
    chunk the pairs that Full adds. Between neighbouring ends of sinks, and of the queries, that is the same in each."""
    queries, keys, sizes = range(n - last, n), range(n), chunks(pattern)
    if not sizes or not last:
        return _counted(pattern, queries, keys)
    (size,) = sizes
    without, within = (_with_chunks(pattern, as_in) for as_in in (NOTHING, FULL))
    ends = {primitive(leaf).last for leaf in leaves(pattern) if primitive(leaf).kind == Kind.SINK}
    bounds = {n - last, n, *(end for end in ends if n - last < end < n)}
    numbers = sorted({number for x in bounds for number in (x // size, x // size + 1)})
    total = _counted(without, queries, keys)
    for number, beyond in pairwise(numbers):
        at = range(number * size, min((number + 1) * size, n))
        inside = range(max(at.start, queries.start), at.stop)
        if inside:
            added = _counted(within, inside, at) - _counted(without, inside, at)
            total += (beyond - number) * added
    return total


def _with_chunks(pattern: Pattern, held: Pattern) -> Pattern:
    return mapped(pattern, lambda leaf: held if chunks(leaf) else leaf)


def _counted(pattern: Pattern, queries: range, keys: range) -> int:
    """Pairs of these queries and keys, none global, from the primitives.

    With a = k - q, every primitive is a bound of a or of k, or says what divides a. Between neighbouring bounds, and
    for offsets that the same steps divide, all pairs are alike: one decides, and they are counted as a series.
    Window.last(3) | Causal() & Sink(1) has the bounds a = -2, 0, 1 and k = 0, 1: for a < -2 only k = 0 is allowed."""
    primitives = [primitive(leaf) for leaf in leaves(pattern)]
    least, most = keys.start - queries.stop + 1, keys.stop - queries.start
    offsets = {least, most, 1}.union(*({p.first, p.last + 1} for p in primitives if p.kind == Kind.WINDOW))
    places = {keys.start, keys.stop}.union(*({p.first, p.last} for p in primitives if p.kind == Kind.SINK))
    steps = sorted({p.step for p in primitives} - {1})
    total = 0
    for (first, beyond), (key, end) in product(
        _parts(offsets, least, most), _parts(places, keys.start, keys.stop)
    ):
        for chosen in (some for size in range(len(steps) + 1) for some in combinations(steps, size)):
            if _allowed(pattern, first, key, chosen):
                total += _alike(range(first, beyond), range(key, end), queries, chosen, steps)
    return total


def _parts(bounds: set[int], first: int, end: int) -> list[tuple[int, int]]:
    return list(pairwise(sorted(bound for bound in bounds if first <= bound <= end)))


def _allowed(pattern: Pattern, a: int, key: int, divides: Sequence[int]) -> bool:
    """Whether a pair at the offset `a`, which these steps divide, and with this key is allowed."""

    def holds(leaf: Pattern) -> bool:
        p: Primitive = primitive(leaf)
        return {
            Kind.FULL: True,
            Kind.CAUSAL: a <= 0,
            Kind.WINDOW: p.first <= a <= p.last and p.step in (1, *divides),
            Kind.SINK: p.first <= key < p.last,
        }.get(p.kind, False)

    return fold(pattern, holds, all, any)


def _alike(offsets: range, keys: range, queries: range, divide: Sequence[int], steps: Sequence[int]) -> int:
    """Pairs at these offsets, whose steps are those in `divide` and no other of `steps`: what all of them divide, less
    what one more divides, and so on."""
    others = [step for step in steps if step not in divide]
    return sum(
        (-1) ** size * _within(offsets, keys, queries, lcm(*divide, *more))
        for size in range(len(others) + 1)
        for more in combinations(others, size)
    )


def _within(offsets: range, keys: range, queries: range, step: int) -> int:
    """Pairs (q, k) of these whose offset k - q is one of `offsets` and a multiple of `step`.

    An offset a has as many as the keys have in common with the queries moved by a: (q1 + a - k0)+ - (q1 + a - k1)+
    - (q0 + a - k0)+ + (q0 + a - k1)+, where (x)+ is x above 0."""
    q0, q1, k0, k1 = queries.start, queries.stop, keys.start, keys.stop
    signed = ((1, q1 - k0), (-1, q1 - k1), (-1, q0 - k0), (1, q0 - k1))
    total = 0
    for sign, moved in signed:
        begin = -(-max(offsets.start, 1 - moved) // step) * step  # the first multiple where a + moved > 0
        count = max(0, -(-(offsets.stop - begin) // step))
        total += sign * (count * (begin + moved) + step * count * (count - 1) // 2)
    return total


def _seen(pattern: Pattern, n: int, last: int, tokens: Tokens | None, tile: int) -> int:
    """`pairs` of the `last` of n queries, looked at."""
    if tokens is None and n > MOST:
        raise PatternError(
            f"pairs: {opaque(pattern) or pattern} is not counted by arithmetic, so that its pairs are looked at one by "
            f"one, and a row of {n} tokens has too many: at most {MOST}"
        )
    tokens = Tokens.range(n) if tokens is None else tokens
    if last < n:
        begins = range(n - last, n, 256)
        parts = (tokens.slice(begin, min(begin + 256, n)) for begin in begins)
        return sum(int(visible(pattern, part, tokens).sum()) for part in parts)
    short = -n % tile
    if short:
        tokens = Tokens.cat([tokens, Tokens(torch.full((1, short), -1))])
    possible, certain = classify(pattern, tokens, tokens, tile, tile)
    total = int(certain.sum()) * tile * tile
    unsure = (possible & ~certain).nonzero()
    for some in unsure.split(1024) if len(unsure) else ():
        row, i, j = some.unbind(1)
        q, k = (_blocks(tokens, row, at, tile) for at in (i, j))
        total += int(visible(pattern, q, k).sum())
    return total


def _blocks(tokens: Tokens, row: Tensor, at: Tensor, tile: int) -> Tokens:
    """Block `at[p]` of row `row[p]`, as row p of a batch."""
    slots = at.unsqueeze(1) * tile + torch.arange(tile)
    return tokens.expand(tokens.rows).select_rows(row).gather(slots)


def span(patterns: Sequence[Pattern]) -> int | None:
    """How many positions lie between the first and the last token that one output of a stack may depend on, both
    counted, where a layer of each pattern follows the other: 1 + the sum of (before + after), the reaches of the
    layers; of windows (before + after) step. None is no bound.

    A span, and no count of tokens: a dilated layer sees only every step-th token of its own."""
    reaches = [bound for pattern in patterns for bound in pattern.reach]
    bounds = [bound for bound in reaches if bound is not None]
    return 1 + sum(bounds) if len(bounds) == len(reaches) else None


def fates(pattern: Pattern, q: Tokens, k: Tokens) -> Tensor:
    """The fate of each key at each query, as indices into `FATES`: int8 [B|1, H|1, T, S].

    "seen" keys are `visible` to it; "kept" ones may be seen by queries from here on, or by other heads; no query from
    here on sees "released" ones (`Retention`), which a cache need not have; "later" ones have yet to come. Where
    queries see later keys nothing is released, and nothing is late."""
    seen = visible(pattern, q, k)
    away, retention = q.index.unsqueeze(-1) - k.index.unsqueeze(-2), pattern.retention
    held = torch.ones_like(away, dtype=torch.bool)
    if pattern.is_causal and retention.reach is not None:
        pinned = k.index < retention.sinks
        if retention.globals and k.is_global is not None:
            pinned = pinned | k.is_global
        held = away <= retention.reach
        if retention.chunk is not None:
            begin = (q.index + 1) // retention.chunk * retention.chunk
            held = held & (k.index.unsqueeze(-2) >= begin.unsqueeze(-1))
        held = held | pinned.unsqueeze(-2)
    fate = torch.where(held, FATES.index("kept"), FATES.index("released")).to(torch.int8)
    if pattern.is_causal:
        fate = fate.masked_fill(away < 0, FATES.index("later"))
    return torch.where(seen, FATES.index("seen"), fate.unsqueeze(1)).to(torch.int8)


def draw(pattern: Pattern, n: int, tokens: Tokens | None = None, marks: str = "#.") -> str:
    """The pattern as text, a row per query and a column per key: the first mark where the key is seen, else the second;
    PerHead: head by head."""
    tokens = Tokens.range(n) if tokens is None else tokens
    blocks = []
    for number, head in enumerate(pattern.heads):
        title = [f"head {number}: {head}"] if len(pattern.heads) > 1 else []
        rows = visible(head, tokens, tokens)[0, 0].tolist()
        blocks.append("\n".join(title + [" ".join(marks[not seen] for seen in row) for row in rows]))
    return "\n\n".join(blocks)
