"""Patterns: which pairs they allow, their text form, reach, and retention in caches."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import PatternError
from headway.patterns import (
    Causal,
    Chunk,
    Full,
    Global,
    GlobalKeys,
    GlobalQueries,
    Pattern,
    PerHead,
    Retention,
    Sink,
    Window,
    parse,
    visible,
)
from headway.tokens import Tokens
from tests.strategies import patterns, tokens


def seen(pattern: Pattern, n: int, tokens: Tokens | None = None) -> list[list[int]]:
    tokens = tokens or Tokens.range(n)
    return [row.nonzero().squeeze(1).tolist() for row in visible(pattern, tokens, tokens)[0, 0]]


def test_row_93_the_leaves_say_what_their_names_say() -> None:
    assert seen(Full(), 2) == [[0, 1], [0, 1]]
    assert seen(Causal(), 3) == [[0], [0, 1], [0, 1, 2]]
    assert seen(Window.last(2), 4) == [[0], [0, 1], [1, 2], [2, 3]]
    assert seen(Window.around(1), 3) == [[0, 1], [0, 1, 2], [1, 2]]
    assert seen(Window(0, 2), 4) == [[0, 1, 2], [1, 2, 3], [2, 3], [3]]
    assert seen(Window(1, 1, step=2), 4) == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert seen(Sink(1) & Causal() | Window.last(1), 3) == [[0], [0, 1], [0, 2]]
    assert seen(Window.last(1), 3) == [[0], [1], [2]]
    assert seen(Chunk(2), 3) == [[0, 1], [0, 1], [2]]
    assert seen(Chunk(3) & Causal(), 5) == [[0], [0, 1], [0, 1, 2], [3], [3, 4]]


def test_global_tokens_see_all_and_are_seen_by_all() -> None:
    """The mask is symmetric, and global tokens differ between rows of a batch (requirement 96)."""
    at = Tokens.range(4).with_global([[1], [3]])
    mask = visible(Window.around(0) | Global(), at, at)
    assert torch.equal(mask, mask.transpose(-1, -2))
    assert mask[0, 0].sum(1).tolist() == [2, 4, 2, 2]
    assert mask[1, 0].sum(1).tolist() == [2, 2, 2, 4]
    assert visible(GlobalKeys(), at, at)[0, 0].sum(0).tolist() == [0, 4, 0, 0]
    assert visible(GlobalQueries(), at, at)[0, 0].sum(1).tolist() == [0, 4, 0, 0]


def test_a_prefix_lm() -> None:
    at = Tokens.range(5).with_global([0, 1])
    mask = visible(Causal() | GlobalKeys() & GlobalQueries(), at, at)[0, 0]
    assert mask.int().tolist() == [
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]


def test_a_window_is_its_definition_pair_by_pair() -> None:
    """Key k is seen by query q if k = q + j * step for some j with -before <= j <= after."""
    for before, after, step in itertools.product((0, 1, 3), (0, 1, 2), (1, 2, 3)):
        places = [j * step for j in range(-before, after + 1)]
        sees = [[k for k in range(14) if k - q in places] for q in range(14)]
        assert seen(Window(before, after, step), 14) == sees, (before, after, step)
    for count in range(4):
        assert seen(Sink(count), 5) == [list(range(count))] * 5


@given(patterns, tokens())
def test_patterns_read_the_index_and_not_the_position(p: Pattern, at: Tokens) -> None:
    elsewhere = replace(at, position=at.index.flip(1), start=None)
    assert torch.equal(visible(p, elsewhere, elsewhere), visible(p, at, at))


@given(patterns)
def test_the_text_form_parses_and_prints_back(p: Pattern) -> None:
    assert parse(str(p)) == p
    assert hash(parse(str(p))) == hash(p)
    heads = PerHead(p, Causal()) if len(p.heads) == 1 else p
    assert parse(str(heads)) == heads


@given(patterns, tokens())
def test_causal_patterns_never_look_ahead_and_reach_is_a_bound(p: Pattern, at: Tokens) -> None:
    distance = at.index.unsqueeze(-2) - at.index.unsqueeze(-1)
    pairs = distance.expand(at.rows, -1, -1)[visible(p, at, at).expand(at.rows, -1, -1, -1)[:, 0]]
    before, after = p.reach
    if p.is_causal:
        assert (pairs <= 0).all()
    if before is not None:
        assert (pairs >= -before).all()
    if after is not None:
        assert (pairs <= after).all()


@given(
    patterns.filter(lambda p: p.is_causal),
    st.integers(0, 24),
    st.lists(st.booleans(), min_size=25, max_size=25),
)
def test_retention_keeps_whatever_a_later_query_sees(p: Pattern, t: int, marks: list[bool]) -> None:
    at = Tokens.range(25).with_global(torch.tensor([marks]))
    needed = visible(p, at, at)[0, 0, t + 1 :, : t + 1].any(0)
    keep = p.retention
    index = torch.arange(t + 1)
    kept = index >= keep.first(t + 1)
    kept = kept | (index < keep.sinks) | (torch.tensor(marks[: t + 1]) & keep.globals)
    assert (needed <= kept).all()


LEAVES = [
    Sink(0),
    Sink(3),
    Window(0),
    Window(4),
    Window(0, 3),
    Window(5, 1),
    Window(2, 1, 3),
    Chunk(1),
    Chunk(7),
]


@pytest.mark.parametrize("leaf", [Causal(), *LEAVES], ids=str)
def test_the_reach_of_a_leaf_is_that_of_its_furthest_pairs(leaf: Pattern) -> None:
    """If there is a bound, some visible pair reaches it."""
    at = Tokens.range(60)
    distances = (at.index.unsqueeze(-2) - at.index.unsqueeze(-1))[visible(leaf, at, at)[:, 0]].tolist()
    for bound, furthest in zip(leaf.reach, (-min([0, *distances]), max([0, *distances])), strict=True):
        assert bound in (None, furthest)


@pytest.mark.parametrize("leaf", [*LEAVES, GlobalKeys(), Window(5) | Sink(2) | GlobalKeys()], ids=str)
def test_the_retention_of_a_leaf_keeps_nothing_in_vain(leaf: Pattern) -> None:
    """The oldest recent key, the last sink and a global key are seen later; keys that are not kept are not."""
    keep, t = leaf.retention, 30
    at = Tokens.range(60).with_global([20])
    needed = visible(leaf, at, at)[0, 0, t + 1 :, : t + 1].any(0).nonzero()[:, 0].tolist()
    assert keep.reach is not None
    recent, first = range(keep.first(t + 1), t + 1), range(keep.sinks)
    pinned = [20] if keep.globals else []
    assert {*recent[:1], *first[-1:], *pinned} <= set(needed) <= {*recent, *first, *pinned}


def test_retention_of_what_decoders_use_is_exact() -> None:
    assert Causal().retention == Retention(None)
    assert Window.last(512).retention == Retention(511)
    assert (Window.last(512) & Causal()).retention == Retention(511)
    assert Window.last(4, step=3).retention == Retention(9)
    assert (Window.last(8) | Causal() & Sink(4)).retention == Retention(7, sinks=4)
    assert (Chunk(8) & Causal()).retention == Retention(7, chunk=8)
    assert (Chunk(8) & Causal() | Causal() & Sink(4)).retention == Retention(7, sinks=4, chunk=8)
    assert (Chunk(8) & Causal() | Window.last(3)).retention == Retention(7)
    assert (Chunk(4) & Causal() | Chunk(6) & Causal()).retention == Retention(5, chunk=12)
    assert (Window.last(8) | Causal() & GlobalKeys()).retention == Retention(7, globals=True)
    assert (Window.last(8) | Causal() & GlobalQueries()).retention == Retention(None)
    assert PerHead(Window.last(8), Window.last(3) | Sink(1) & Causal()).retention == Retention(7, sinks=1)


def test_heads_of_their_own_compose() -> None:
    both = PerHead(Window.last(2), Full()) & Causal()
    assert both == PerHead(Window.last(2) & Causal(), Full() & Causal())
    at = Tokens.range(3)
    assert visible(both, at, at).shape == (1, 2, 3, 3)
    with pytest.raises(PatternError, match="& cannot join a PerHead of 2 heads and one of 3 heads"):
        _ = PerHead(Full(), Full()) & PerHead(Full(), Full(), Full())
    with pytest.raises(PatternError, match="one pattern per query head, none of them a PerHead"):
        PerHead(PerHead(Full()))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Window(-1), "before must be a whole number of at least 0, got -1"),
        (lambda: Window(3, 0, 0), "step must be a whole number of at least 1, got 0"),
        (lambda: Window(2.5), "before must be a whole number of at least 0, got 2.5"),
        (lambda: Window.last(0), r"must be an integer of at least 1, got 0; for no window use Causal\(\)"),
        (lambda: Window.last(None), "got None; for no window"),
        (lambda: Sink(-1), r"count must be a whole number in 0..2\*\*62, got -1"),
        (
            lambda: parse("Window.lst(4)"),
            r"unknown name 'Window.lst' at character 1 \(did you mean \"Window.last\"\?\)",
        ),
        (lambda: parse("Causal() & Foo"), "unknown name 'Foo' at character 12"),
        (lambda: parse("Window.last(4"), "cannot be read"),
        (lambda: parse("Window.last(2.5)"), "'2.5' at character 13 is neither a pattern nor a whole number"),
        (lambda: parse("Window.last(4, 5, 6)"), "Window.last at character 1"),
        (lambda: parse("Window.last(before=4)"), "Window.last at character 1: .*before"),
        (lambda: parse("Window.last(0)"), "must be an integer of at least 1, got 0"),
        (lambda: parse("__import__('os')"), "unknown name '__import__'"),
        (lambda: parse("Causal() + Full()"), "is not a pattern; known: Full, Causal"),
        (lambda: parse(""), "pattern must be text such as"),
        (lambda: parse(None), "pattern must be text such as"),
    ],
)
def test_bad_patterns(make, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PatternError, match=text):
        make()


def test_windows_and_no_pattern_do_not_mix() -> None:
    with pytest.raises(PatternError, match=r"& joins two patterns, but to the right of Causal\(\) is 3"):
        _ = Causal() & 3  # type: ignore[operator]
