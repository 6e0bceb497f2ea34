"""Plans are disjoint and cover exactly the allowed pairs, and pair counts are exact: by brute force over all pairs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.attention import plan
from headway.errors import PatternError
from headway.patterns import Causal, Chunk, Full, Pattern, Sink, Window, classify, draw, pairs, parse, visible
from headway.patterns.program import simplify
from headway.tokens import Tokens
from tests.plans import area, entries
from tests.strategies import patterns, tokens

tiles = st.sampled_from([1, 2, 3, 8])


@given(patterns, tokens(), tokens(), tiles, tiles)
@settings(max_examples=150)
def test_judging_blocks_is_conservative(p: Pattern, q: Tokens, k: Tokens, q_tile: int, k_tile: int) -> None:
    rows = max(q.rows, k.rows)
    if min(q.rows, k.rows) not in (1, rows):
        return
    truth = visible(p, q, k).expand(rows, 1, q.count, k.count)[:, 0]
    possible, certain = (t.expand(rows, -1, -1) for t in classify(p, q, k, q_tile, k_tile))
    for b, i, j in torch.ones_like(possible).nonzero().tolist():
        pairs_of_tile = truth[b, i * q_tile : (i + 1) * q_tile, j * k_tile : (j + 1) * k_tile]
        if pairs_of_tile.any():
            assert possible[b, i, j]
        if certain[b, i, j]:
            assert pairs_of_tile.all()


@given(patterns, tokens(st.integers(0, 40)), tokens(st.integers(0, 40)), tiles, tiles)
@settings(max_examples=150)
def test_a_plan_covers_exactly_what_is_allowed(
    p: Pattern, q: Tokens, k: Tokens, q_tile: int, k_tile: int
) -> None:
    rows = max(q.rows, k.rows)
    if min(q.rows, k.rows) not in (1, rows):
        return
    truth = visible(p, q, k).expand(rows, 1, q.count, k.count)[:, 0]
    times = torch.zeros(q.count, k.count, dtype=torch.int64)
    for tile, row in enumerate(entries(plan(p, q, k, q_tile, k_tile))):
        queries = slice(tile * q_tile, (tile + 1) * q_tile)
        for entry in row:
            assert 0 <= entry.begin < entry.end <= k.count
            times[queries, entry.begin : entry.end] += 1
            if entry.full:
                assert truth[:, queries, entry.begin : entry.end].all()
    assert (times <= 1).all()
    assert (truth <= times.bool()).all()


@given(st.integers(1, 300), st.integers(0, 60), st.integers(0, 20), st.integers(1, 4))
def test_a_window_plans_and_costs_what_it_sees(n: int, before: int, after: int, step: int) -> None:
    p = Window(before, after, step)
    tokens = Tokens.range(n)
    assert pairs(p, n) == int(visible(p, tokens, tokens).sum())
    made_plan = plan(p, tokens, tokens, 8, 8)
    assert area(made_plan) <= (n + 8) * ((before + after) * step + 3 * 8)


@given(patterns, tokens(st.integers(1, 70)), st.sampled_from([4, 16, 64]))
def test_pairs_counts(p: Pattern, t: Tokens, tile: int) -> None:
    seen = visible(p, t, t)
    assert pairs(p, t.count, tokens=t, tile=tile) == int(seen.expand(t.rows, -1, -1, -1).sum())


@given(patterns, st.integers(1, 90), st.integers(1, 90))
def test_pairs_without_global_tokens_are_arithmetic(p: Pattern, n: int, last: int) -> None:
    """For all queries, and for only the last ones."""
    tokens = Tokens.range(n)
    seen = visible(p, tokens, tokens)[0]
    assert pairs(p, n) == int(seen.sum())
    assert pairs(p, n, last=last) == int(seen[..., max(0, n - last) :, :].sum())


def test_pairs_are_exact_at_any_length() -> None:
    n, w = 10**15, 10**6
    assert pairs(Causal(), n) == n * (n + 1) // 2
    assert pairs(Window.last(w), n, heads=3) == 3 * (w * (w + 1) // 2 + (n - w) * w)
    assert pairs(Window.last(w, step=7) | Causal() & Sink(4), n, last=1) == w + 4 - sum(
        (n - 1 - k) % 7 == 0 and n - 1 - k < 7 * w for k in range(4)
    )


@given(st.integers(1, 9), st.sampled_from(["Causal", "Window.last(5)", "Window.around(3, step=2)"]),
       st.integers(0, 30), st.integers(1, 90), st.integers(1, 90))  # fmt: skip
def test_pairs_of_chunks_are_arithmetic(size: int, joined: str, sink: int, n: int, last: int) -> None:
    """Sinks end within a chunk, at its end, or after all chunks; the last queries may begin within a chunk."""
    tokens = Tokens.range(n)
    for p in (Chunk(size) & parse(joined) | Sink(sink), Chunk(size) & Sink(sink) | parse(joined) & Causal()):
        seen = visible(p, tokens, tokens)[0]
        assert pairs(p, n) == int(seen.sum())
        assert pairs(p, n, last=last) == int(seen[..., max(0, n - last) :, :].sum())


def test_pairs_of_chunks_are_exact_at_any_length() -> None:
    n, size = 10**15 + 3, 8192
    whole, remainder = divmod(n, size)
    chunks = Chunk(size) & Causal()
    assert pairs(chunks, n) == whole * size * (size + 1) // 2 + remainder * (remainder + 1) // 2
    assert pairs(chunks, n, last=1) == remainder
    with pytest.raises(PatternError, match=r"Chunk\(4\) \| Chunk\(6\) has no closed-form count"):
        pairs(Chunk(4) | Chunk(6), n)


@given(patterns, tokens(), tokens())
def test_simplify_allows_the_same_pairs(p: Pattern, q: Tokens, k: Tokens) -> None:
    rows = max(q.rows, k.rows)
    if min(q.rows, k.rows) not in (1, rows):
        return
    plain = simplify(p, q, k)
    assert torch.equal(*(visible(x, q, k).expand(rows, 1, q.count, k.count) for x in (p, plain)))


def test_what_simplify_finds() -> None:
    at = Tokens.range(10)
    assert simplify(Window.last(10), at, at) == Causal()
    assert simplify(Window.last(9), at, at) == Window.last(9)
    assert simplify(Window.last(64) & Causal() | Sink(2) & Causal(), at, at) != Full()
    assert simplify(Causal(), Tokens.range(1, start=9), at) == Full()
    assert simplify(Window.around(9), at, at) == Full()
    assert simplify(Causal() | Sink(0), at, at) == Causal()
    assert simplify(Chunk(10) & Causal(), at, at) == Causal()
    assert simplify(Chunk(9) & Causal(), at, at) == Chunk(9) & Causal()
    assert simplify(Chunk(8), Tokens.range(2, start=8), Tokens.range(8)) == Sink(0)


def test_the_picture() -> None:
    assert draw(Window.last(2) | Sink(1) & Causal(), 4).splitlines() == [
        "# . . .",
        "# # . .",
        "# # # .",
        "# . # #",
    ]
