"""A plan equals the one made by judging every pair of tiles by itself."""

from collections.abc import Iterator
from importlib import import_module
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.attention import Entry, plan
from headway.attention.backends.native.plan_arrays import plan_arrays
from headway.patterns import Causal, Pattern, Sink, Window, classify
from headway.tokens import Tokens
from tests.plans import area, entries
from tests.strategies import patterns, tokens

counts, tiles = st.integers(0, 80), st.sampled_from([1, 2, 3])
N = 5000
module = import_module("headway.attention.plan")


@pytest.fixture(scope="module", autouse=True, params=["all at once", "blocks first"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "blocks first":
            patch.setattr(module, "AT_ONCE", -1)
        yield


def naive(pattern: Pattern, q: Tokens, k: Tokens, tile: int, k_tile: int) -> list[list[Entry]]:
    """Judges every pair of tiles, then joins neighbours of the same kind."""
    possible, certain = classify(pattern, q, k, tile, k_tile)
    possible_in_any, certain_in_all = possible.any(0).tolist(), certain.all(0).tolist()
    rows = []
    for possible_row, certain_row in zip(possible_in_any, certain_in_all, strict=True):
        row: list[Entry] = []
        for j in (j for j, is_possible in enumerate(possible_row) if is_possible):
            entry = Entry(j * k_tile, min((j + 1) * k_tile, k.count), certain_row[j])
            if row and row[-1].end == entry.begin and row[-1].full == entry.full:
                entry = Entry(row.pop().begin, entry.end, entry.full)
            row.append(entry)
        rows.append(row)
    return rows


@given(patterns, tokens(counts), tokens(counts), tiles, tiles)
@settings(max_examples=200)
def test_looking_at_blocks_first_changes_nothing(
    p: Pattern, q: Tokens, k: Tokens, tile: int, k_tile: int
) -> None:
    if min(q.rows, k.rows) not in (1, max(q.rows, k.rows)):
        return
    assert entries(plan(p, q, k, tile, k_tile)) == naive(p, q, k, tile, k_tile)


@pytest.mark.parametrize(
    "at",
    [
        Tokens.range(N),
        Tokens.packed([[N // 3, N - N // 3]]),
        Tokens.packed([[N], [700, 1, 299, 3000], [N // 2, N // 2], [10] * 400], N),
        Tokens.from_lengths([N, 1, 3000, 0], N, "left"),
    ],
    ids=["range", "packed", "packed-rows", "ragged-rows"],
)
@pytest.mark.parametrize(("tile", "k_tile"), [(128, 64), (96, 64), (64, 96)])
def test_long_rows_too(at: Tokens, tile: int, k_tile: int) -> None:
    for p in (Causal(), Window.around(256), Window.last(512) | Causal() & Sink(4), Window.last(99, step=4)):
        assert entries(plan(p, at, at, tile, k_tile)) == naive(p, at, at, tile, k_tile)
    late = at.slice(N - 300, N)
    assert entries(plan(Causal(), late, at, tile, k_tile)) == naive(Causal(), late, at, tile, k_tile)


def of_row(at: Tokens, b: int) -> Tokens:
    return at.map(lambda t: t if t.shape[0] == 1 else t[b : b + 1], at.start)


def same_as_alone(p: Pattern, q: Tokens, k: Tokens, tile: int, k_tile: int) -> None:
    rows = range(max(q.rows, k.rows))
    alone = [entries(plan(p, of_row(q, b), of_row(k, b), tile, k_tile)) for b in rows]
    assert entries(plan(p, q, k, tile, k_tile, apart=True)) == list(chain.from_iterable(alone))


@given(patterns, tokens(counts), tokens(counts), tiles, tiles)
@settings(max_examples=200)
def test_rows_apart_are_planned_as_if_each_were_alone(
    p: Pattern, q: Tokens, k: Tokens, tile: int, k_tile: int
) -> None:
    if min(q.rows, k.rows) in (1, max(q.rows, k.rows)):
        same_as_alone(p, q, k, tile, k_tile)


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_ragged_rows_apart_too(side: str) -> None:
    at = Tokens.from_lengths([N, 1, 3000, 0, 3000], N, side)
    packed = Tokens.packed([[N], [700, 1, 299, 3000], [], [N // 2, N // 2], [10] * 400], N)
    for p in (Causal(), Window.around(256), Window.last(99, step=4) | Causal() & Sink(4)):
        for q, k in ((at, at), (packed, packed), (at.slice(N - 1, N), at), (Tokens.range(N), at)):
            same_as_alone(p, q, k, 96, 64)


def test_documents_packed_side_by_side_cost_what_they_cost_alone() -> None:
    """If documents end at tile borders, packing adds no area."""
    lengths = [1024, 128, 3072]
    packed = Tokens.packed([lengths])
    for p in (Causal(), Window.last(512), Window.around(256)):
        alone = sum(area(plan(p, Tokens.range(n), Tokens.range(n))) for n in lengths)
        assert area(plan(p, packed, packed)) == alone


def test_batches_of_one_length_are_planned_by_their_number_of_rows() -> None:
    """Rows of one document each are planned without reading their data; the plan is cached with the number of rows."""
    for rows in (2, 3, 2):
        tokens = Tokens.packed([[24]] * rows, total=24)
        arrays = plan_arrays(Causal(), tokens, tokens, False)
        assert (arrays.plan.rows, arrays.queries.rows, arrays.keys.rows) == (rows, rows, rows)


def test_a_batch_without_rows_plans_nothing() -> None:
    tokens = Tokens(torch.zeros(0, 40, dtype=torch.int64))
    assert entries(plan(Causal(), tokens, tokens, 8, 8)) == [[]] * 5
    assert entries(plan(Causal(), tokens, tokens, 8, 8, apart=True)) == []
