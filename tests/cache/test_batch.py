"""The rows of a batch in pages: nothing is lost, doubled or mixed up by appending, trimming, forking and reordering."""

import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from headway.cache import PAGE, BatchCache, CacheSpec, PagedCache, PagedLayer
from headway.cache.paged_step import places, stored_keys
from headway.errors import CacheError
from headway.models import Decoder, ModelSpec, build
from headway.patterns import Causal, GlobalKeys, Pattern, Sink, Window
from headway.tokens import Tokens
from tests.cache.page_counts import page_counts

SLACK = 3
PATTERNS: list[Pattern] = [
    Causal(),
    Window.last(9),
    Window.last(3, step=5) | (Causal() & Sink(2)),
    Window.last(9) | (Causal() & GlobalKeys()),
]


def cache_of(batch: int, patterns: list[Pattern] = PATTERNS, **more: Any) -> BatchCache:
    return BatchCache(PagedCache(CacheSpec(kv_heads=1, head_dim=1), patterns, slack=SLACK), batch, **more)


def store(cache: BatchCache, tokens: Tokens, values: Tensor) -> None:
    """Stores numbers [B, T] as keys of one dimension, the same in every layer."""
    with cache.step(tokens) as packed:
        new = packed.take(values.unsqueeze(-1)).unsqueeze(1)
        for layer in cache.pages.layers:
            assert isinstance(layer, PagedLayer)
            layer.update(new, -new, packed.tokens)


class Row(list[tuple[int, bool]]):
    """Numbers, each with whether it is global; `longest`: the most numbers that the row ever had."""

    longest = 0

    def copy(self) -> "Row":
        other = Row(self)
        other.longest = self.longest
        return other


class Rows(RuleBasedStateMachine):
    """Caches of rows of numbers that never repeat, beside lists of the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.caches: list[tuple[BatchCache, list[Row]]] = []
        self.next = 1

    @initialize(batch=st.integers(1, 3))
    def begin(self, batch: int) -> None:
        self.caches.append((cache_of(batch), [Row() for _ in range(batch)]))

    def pick(self, data: st.DataObject) -> tuple[BatchCache, list[Row]]:
        return self.caches[data.draw(st.integers(0, len(self.caches) - 1))]

    @rule(data=st.data(), most=st.sampled_from([1, 5, 70]), side=st.sampled_from(["left", "right"]))
    def append(self, data: st.DataObject, most: int, side: str) -> None:
        cache, rows = self.pick(data)
        counts = [data.draw(st.integers(0, most)) for _ in rows]
        tokens = cache.next_tokens(most, counts, side)
        valid = tokens.valid.expand(len(rows), -1)
        marks = torch.zeros_like(valid)
        values = torch.full(valid.shape, float("nan"))
        for b, row in enumerate(rows):
            for t in valid[b].nonzero()[:, 0].tolist():
                marks[b, t] = self.next % 5 == 2
                values[b, t] = self.next
                row.append((self.next, bool(marks[b, t])))
                self.next += 1
            row.longest = max(row.longest, len(row))
        store(cache, tokens.with_global(marks) if bool(marks.any()) else tokens, values)

    @rule(data=st.data(), n=st.integers(0, SLACK))
    def trim(self, data: st.DataObject, n: int) -> None:
        cache, rows = self.pick(data)
        counts = [max(0, min(n + b, len(row), len(row) - row.longest + SLACK)) for b, row in enumerate(rows)]
        cache.trim(counts)
        for row, count in zip(rows, counts, strict=True):
            del row[len(row) - count :]

    @rule(data=st.data())
    def trim_too_much(self, data: st.DataObject) -> None:
        cache, rows = self.pick(data)
        counts = [min(1, len(row)) for row in rows[:-1]] + [len(rows[-1]) + 1]
        with pytest.raises(CacheError, match="cannot trim"):
            cache.trim(counts)

    @precondition(lambda self: len(self.caches) < 3)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        cache, rows = self.pick(data)
        self.caches.append((cache.fork(), [row.copy() for row in rows]))

    @precondition(lambda self: len(self.caches) > 1)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.caches.pop(data.draw(st.integers(0, len(self.caches) - 1)))

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        cache, rows = self.pick(data)
        parents = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=4))
        cache.reorder(parents)
        rows[:] = [rows[parent].copy() for parent in parents]

    @invariant()
    def every_layer_holds_what_its_queries_may_see(self) -> None:
        for cache, rows in self.caches:
            assert cache.lengths == tuple(map(len, rows))
            for pattern, layer in zip(PATTERNS, cache.pages.layers, strict=True):
                assert isinstance(layer, PagedLayer)
                at = places(cache.tables, layer.of, cache.device)
                keys, tokens = stored_keys(layer.tensors, at).gathered(), at.tokens
                held = {
                    (int(d), int(i)): (float(k), bool(g))
                    for d, i, k, g in zip(
                        tokens.documents[0],
                        tokens.index[0],
                        keys.k[0, 0, :, 0],
                        tokens.globals[0],
                        strict=True,
                    )
                    if i >= 0
                }
                need = pattern.retention
                for b, row in enumerate(rows):
                    for i, (number, marked) in enumerate(row):
                        kept = need.reach is None or i >= len(row) - need.reach or i < need.sinks
                        if kept or (marked and need.globals):
                            assert held[b, i] == (number, marked), (pattern, b, i)
                        else:
                            assert held.get((b, i), (number, marked)) == (number, marked)

    @invariant()
    def pages_are_those_in_use(self) -> None:
        gc.collect(0)
        if self.caches:
            pool = self.caches[0][0].pages.pool
            for of, counts in enumerate(page_counts(pool)):
                used = {
                    page for cache, _ in self.caches for table in cache.tables for page in table.pages[of]
                }
                assert counts["used"] == len(used - {None})


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_pages_of_a_cache_that_is_gone_are_free() -> None:
    cache = cache_of(2)
    store(cache, cache.next_tokens(70), torch.ones(2, 70))
    other = cache.fork()
    pool = cache.pages.pool
    before = pool.held
    store(other, other.next_tokens(70), torch.ones(2, 70))
    assert pool.held > before
    del other
    assert pool.held == before
    assert cache.nbytes == before


def test_a_global_token_that_was_taken_back_is_forgotten() -> None:
    cache = cache_of(1)
    store(cache, cache.next_tokens(3).with_global([[1, 2]]), torch.ones(1, 3))
    cache.trim(1)
    store(cache, cache.next_tokens(1), torch.ones(1, 1))
    tokens = places(cache.tables, 0, cache.device).tokens
    assert tokens.index[0, tokens.globals[0]].tolist() == [1]


def test_only_a_page_that_is_written_to_is_copied() -> None:
    cache = cache_of(1, [Causal()])
    store(cache, cache.next_tokens(3 * PAGE + 5), torch.ones(1, 3 * PAGE + 5))
    cache.reorder([0, 0])
    assert cache.pages.copied == 0
    store(cache, cache.next_tokens(1), torch.ones(2, 1))
    assert cache.pages.copied == 1, "the last row keeps the page, the other has one of its own"


REFUSED: dict[str, tuple[Callable[[BatchCache], Any], str]] = {
    "a gap": (
        lambda c: store(c, Tokens.range(2, start=5), torch.ones(2, 2)),
        r"row 0 has seen 4 tokens, so the next indices are 4, 5, ..., but the chunk has [5, 6]; number it from there",
    ),
    "an order": (
        lambda c: store(c, Tokens(torch.tensor([[4, 6]])), torch.ones(2, 2)),
        "row 0 has seen 4 tokens, so the next indices are 4, 5, ..., but the chunk has [4, 6]",
    ),
    "rows": (
        lambda c: store(c, Tokens.range(1, start=4).expand(3), torch.ones(3, 1)),
        "tokens of 3 rows for a cache of 2; give one row of tokens for each, or one for all",
    ),
    "documents": (
        lambda c: store(c, Tokens(torch.tensor([[4, 0]]), torch.tensor([[0, 1]])), torch.ones(2, 2)),
        "tokens must not have documents or positions, since a row is one text",
    ),
    "positions": (
        lambda c: store(c, Tokens.range(1, 4).with_position(torch.tensor([[9]])), torch.ones(2, 1)),
        "tokens must not have documents or positions",
    ),
    "device": (
        lambda c: store(c, Tokens.range(1, 4, device="meta"), torch.ones(2, 1)),
        "the tokens are on meta, the cache is on cpu; move them: tokens.to(device)",
    ),
    "gradient": (
        lambda c: store(c.fork(), c.next_tokens(1), torch.ones(2, 1, requires_grad=True)),
        "keys or values require a gradient, and a cache holds none",
    ),
    "lengths": (
        lambda c: c.next_tokens(2, [1, 3]),
        "lengths must be 2 numbers in 0..2, one per row, got [1, 3]",
    ),
    "side": (lambda c: c.next_tokens(2, side="up"), 'side must be "left" or "right", got \'up\''),
    "count": (lambda c: c.next_tokens(-1), "count must be 0 or more, got -1"),
    "trim": (lambda c: c.trim(5), "cannot trim 5 tokens of a text of 4"),
    "trim of more rows": (lambda c: c.trim([1, 1, 1]), "one for each of the 2 rows, got [1, 1, 1]"),
    "trim by halves": (lambda c: c.trim(torch.tensor([0.5, 1])), "give one whole number"),
    "row": (lambda c: c.reorder([0, 2]), "rows are numbers in 0..1, got [0, 2]"),
    "batch": (lambda _: cache_of(-1), "batch must be 0 or more, got -1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_changes_nothing(what: str) -> None:
    cache = cache_of(2)
    store(cache, cache.next_tokens(4), torch.ones(2, 4))
    call, text = REFUSED[what]
    with pytest.raises(CacheError, match=re.escape(text)):
        call(cache)
    assert cache.lengths == (4, 4)
    store(cache, cache.next_tokens(1), torch.ones(2, 1))


def test_a_window_that_was_released_says_how_much_slack_it_takes() -> None:
    cache = cache_of(1, [Window.last(9)])
    store(cache, cache.next_tokens(2 * PAGE), torch.ones(1, 2 * PAGE))
    with pytest.raises(CacheError, match=r"layers that keep the last 8 have released .*; give slack=64"):
        cache.trim(PAGE)
    cache.trim(SLACK)
    assert cache.lengths == (2 * PAGE - SLACK,)


def model() -> Decoder:
    return build(ModelSpec.of_depth(2, 53, patterns=(Window.last(5), Causal())), seed=0).eval()


@torch.no_grad()
def test_a_pass_that_was_broken_off_is_noticed_and_a_fork_is_whole() -> None:
    decoder, ids = model(), torch.arange(12).view(2, 6)
    cache = decoder.make_cache(2)
    decoder(ids[:, :5], cache=cache)
    fork, whole = cache.fork(), decoder(ids)
    hook = decoder.model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decoder(ids[:, 5:], cache=cache)
    hook.remove()
    with pytest.raises(CacheError, match="a forward pass failed midway"):
        decoder(ids[:, 5:], cache=cache)
    with pytest.raises(CacheError, match="a forward pass failed midway"):
        decoder(ids[:, 5:], cache=cache.fork())
    torch.testing.assert_close(decoder(ids[:, 5:], cache=fork), whole[:, 5:], rtol=1e-5, atol=1e-5)


def test_a_cache_filled_in_inference_mode_can_go_on_outside() -> None:
    decoder, ids = model(), torch.arange(12).view(2, 6)
    cache = decoder.make_cache(2)
    with torch.inference_mode():
        decoder(ids[:, :5], cache=cache)
    with torch.no_grad():
        actual = decoder(ids[:, 5:], cache=cache)
        torch.testing.assert_close(actual, decoder(ids)[:, 5:], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_it_says_what_it_is_and_holds() -> None:
    decoder = model()
    cache = decoder.make_cache(2)
    assert (len(cache), cache.batch, cache.nbytes) == (2, 2, 0)
    decoder(torch.zeros(2, 3, dtype=torch.int64), tokens=cache.next_tokens(3, [3, 1]), cache=cache)
    spec = decoder.spec
    page = 2 * PAGE * spec.kv_heads * spec.head_dim * 4
    assert (cache.slots, cache.nbytes) == ((PAGE, PAGE), 2 * 2 * page)
    assert repr(cache) == f"BatchCache(batch=2, lengths=[3, 1], nbytes={cache.nbytes})"
    assert (decoder.make_cache(0).batch, decoder.make_cache(0).slots) == (0, (0, 0))
