"""Statistics and text drawings of patterns: the number of allowed pairs, the states of keys, and which keys are
seen."""

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
"""Maximum row length for which pairs are checked one by one, if a pattern defines no more than `allows`."""
FATES = ("later", "released", "kept", "seen")
"""The states of a key at a query: yet to come, released, kept for later queries, or seen."""


def pairs(
    pattern: Pattern,
    n: int,
    *,
    heads: int = 1,
    tokens: Tokens | None = None,
    last: int | None = None,
    tile: int = 64,
) -> int:
    """Returns the exact number of allowed (query, key) pairs in an n x n call with `heads` query heads (for `PerHead`,
    its own), or for the `last` queries only.

    Without `tokens`, which mark global tokens, this is arithmetic for any n. With them, and for a pattern that has a
    leaf without a primitive or chunks of several sizes, blocks of `tile` tokens that are allowed or ruled out as a
    whole are counted as areas, and the predicate is evaluated on the other blocks only, so that nothing of size n x n
    is built.

    Raises PatternError if `tokens` has another number of slots, if `last` is combined with tokens, and for more than
    `MOST` tokens if pairs must be checked one by one."""
    if tokens is not None and (tokens.count != n or last is not None):
        mixed = f"last={last} cannot be combined with tokens; drop one of them"
        raise PatternError(
            f"pairs: {f'tokens describe {tokens.count} slots, but n is {n}' if last is None else mixed}"
        )
    count = heads if len(pattern.heads) == 1 else 1
    last = n if last is None else min(last, n)
    return count * sum(
        _by_chunks(head, n, last)
        if tokens is None and opaque(head) is None and len(chunks(head)) < 2
        else _seen(head, n, last, tokens, tile)
        for head in pattern.heads
    )


def _by_chunks(pattern: Pattern, n: int, last: int) -> int:
    """Returns `pairs` of the `last` of n queries without global tokens, from primitives whose chunks all have one size.

    Chunk is Full within a chunk, and nothing between chunks: pairs are counted with Chunk replaced by nothing, plus,
    within each chunk, the pairs that Full adds. Chunks that contain no end of a sink or of the queries all add the
    same number."""
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
    """Returns the number of allowed pairs of these queries and keys, without global tokens, from the primitives.

    With a = k - q, every primitive bounds a or k, or requires a step to divide a. Between neighbouring bounds, and for
    offsets with the same dividing steps, all pairs are alike: one is tested, and they are counted as a series.
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
        for chosen in (subset for size in range(len(steps) + 1) for subset in combinations(steps, size)):
            if _allowed(pattern, first, key, chosen):
                total += _alike(range(first, beyond), range(key, end), queries, chosen, steps)
    return total


def _parts(bounds: set[int], first: int, end: int) -> list[tuple[int, int]]:
    return list(pairwise(sorted(bound for bound in bounds if first <= bound <= end)))


def _allowed(pattern: Pattern, a: int, key: int, divides: Sequence[int]) -> bool:
    """Returns whether a pair at offset `a`, which exactly these steps divide, with this key is allowed."""

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
    """Returns the number of pairs at these offsets that the steps in `divide`, and no other of `steps`, divide:
    inclusion-exclusion over the other steps."""
    # steps 2 and 3, divide (2,): multiples of 2 less multiples of 6
    others = [step for step in steps if step not in divide]
    return sum(
        (-1) ** size * _within(offsets, keys, queries, lcm(*divide, *more))
        for size in range(len(others) + 1)
        for more in combinations(others, size)
    )


def _within(offsets: range, keys: range, queries: range, step: int) -> int:
    """Returns the number of pairs (q, k) of these whose offset k - q is in `offsets` and a multiple of `step`.

    The number for one offset a is the overlap of the keys with the queries shifted by a, with (x)+ = max(x, 0):
    (q1 + a - k0)+ - (q1 + a - k1)+ - (q0 + a - k0)+ + (q0 + a - k1)+."""
    q0, q1, k0, k1 = queries.start, queries.stop, keys.start, keys.stop
    signed = ((1, q1 - k0), (-1, q1 - k1), (-1, q0 - k0), (1, q0 - k1))
    total = 0
    for sign, moved in signed:
        begin = -(-max(offsets.start, 1 - moved) // step) * step  # the first multiple where a + moved > 0
        count = max(0, -(-(offsets.stop - begin) // step))
        total += sign * (count * (begin + moved) + step * count * (count - 1) // 2)
    return total


def _seen(pattern: Pattern, n: int, last: int, tokens: Tokens | None, tile: int) -> int:
    """Returns `pairs` of the `last` of n queries by evaluating the predicate."""
    if tokens is None and n > MOST:
        raise PatternError(
            f"pairs: {opaque(pattern) or pattern} has no closed-form count; its pairs are counted one by one, up to "
            f"n = {MOST}, got n = {n}"
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
    for block_pairs in unsure.split(1024) if len(unsure) else ():
        row, i, j = block_pairs.unbind(1)
        q, k = (_blocks(tokens, row, at, tile) for at in (i, j))
        total += int(visible(pattern, q, k).sum())
    return total


def _blocks(tokens: Tokens, row: Tensor, at: Tensor, tile: int) -> Tokens:
    """Returns block `at[p]` of row `row[p]`, as row p of a batch."""
    slots = at.unsqueeze(1) * tile + torch.arange(tile)
    return tokens.expand(tokens.rows).select_rows(row).gather(slots)


def span(patterns: Sequence[Pattern]) -> int | None:
    """Returns the number of positions from the first to the last token, both included, that one output of a stack may
    depend on, with one layer per pattern: 1 + the sum of the layers' reaches (before + after, for windows times step);
    None is unbounded.

    It is a span, not a number of tokens: a dilated layer sees only every step-th token of it."""
    reaches = [bound for pattern in patterns for bound in pattern.reach]
    bounds = [bound for bound in reaches if bound is not None]
    return 1 + sum(bounds) if len(bounds) == len(reaches) else None


def fates(pattern: Pattern, q: Tokens, k: Tokens) -> Tensor:
    """Returns the state of each key at each query, as an index into `FATES`: int8 [B|1, H|1, T, S].

    "seen" keys are `visible` to the query; "kept" keys may be seen by queries from here on, or by other heads;
    "released" keys are seen by no query from here on (`Retention`), so a cache need not store them; "later" keys are
    yet to come. If queries see later keys, nothing is released, and nothing is "later"."""
    seen = visible(pattern, q, k)
    away, retention = q.index.unsqueeze(-1) - k.index.unsqueeze(-2), pattern.retention
    held = torch.ones_like(away, dtype=torch.bool)
    if pattern.is_causal and retention.reach is not None:
        pinned = k.index < retention.sinks
        if retention.globals and k.is_global is not None:
            pinned = pinned | k.is_global
        held = away <= retention.reach
        if retention.chunk is not None:
            begin = q.index // retention.chunk * retention.chunk
            held = held & (k.index.unsqueeze(-2) >= begin.unsqueeze(-1))
        held = held | pinned.unsqueeze(-2)
    fate = torch.where(held, FATES.index("kept"), FATES.index("released")).to(torch.int8)
    if pattern.is_causal:
        fate = fate.masked_fill(away < 0, FATES.index("later"))
    return torch.where(seen, FATES.index("seen"), fate.unsqueeze(1)).to(torch.int8)


def draw(pattern: Pattern, n: int, tokens: Tokens | None = None, marks: str = "#.") -> str:
    """Returns the pattern as text, one row per query and one column per key: the first mark if the key is seen,
    else the second; for PerHead, head by head."""
    tokens = Tokens.range(n) if tokens is None else tokens
    blocks = []
    for number, head in enumerate(pattern.heads):
        title = [f"head {number}: {head}"] if len(pattern.heads) > 1 else []
        rows = visible(head, tokens, tokens)[0, 0].tolist()
        blocks.append("\n".join(title + [" ".join(marks[not seen] for seen in row) for row in rows]))
    return "\n\n".join(blocks)
