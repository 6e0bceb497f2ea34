"""Decoding through a cache equals one full forward, for any pattern, split and padding.

The truth is plain float64 attention over whole rows (tests/naive.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from headway.attention import KeyValues, attend, attend_keys
from headway.cache import PAGE, BatchCache, CacheSpec, PagedCache, PagedLayer, choose_cache
from headway.patterns import Causal, GlobalKeys, Pattern, PerHead, Sink, Window
from headway.scores import ALiBi, Score, SoftCap
from headway.tokens import Tokens
from tests.cache.layers import attended
from tests.naive import naive
from tests.strategies import leaves, patterns
from tests.tolerance import assert_within_reference

H, K, D = 4, 2, 8

decoder_patterns: st.SearchStrategy[Pattern] = st.one_of(
    patterns.map(lambda p: Causal() & p),
    st.tuples(st.integers(0, 6), st.integers(1, 3), leaves).map(
        lambda t: Window(t[0], 0, t[1]) | Causal() & t[2]
    ),
    st.lists(leaves.map(lambda p: Causal() & p), min_size=H, max_size=H).map(lambda p: PerHead(*p)),
)


@st.composite
def splits(draw: st.DrawFn, lengths: list[int]) -> list[list[int]]:
    """Draws chunks that together give each row its length: counts for each row, some of them 0."""
    most = draw(st.sampled_from([2, 5, 30, 90]))
    left, result = list(lengths), []
    together = draw(st.booleans())
    while any(left):
        if together and len(set(left)) == 1:
            counts = [min(left[0], draw(st.integers(1, most)))] * len(left)
        else:
            counts = [min(n, draw(st.integers(0, most))) for n in left]
            if not any(counts):
                counts = [min(n, 1) for n in left]
        left = [n - c for n, c in zip(left, counts, strict=True)]
        result.append(counts)
    return result


def rows_of(lengths: list[int], marks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tokens]:
    """Returns q, k, v [B, heads, n, D] (NaN after a row's end) and their tokens."""
    n = max(lengths)
    tokens = Tokens.from_lengths(lengths, n)
    tokens = replace(tokens, is_global=marks & tokens.valid)
    q, k, v = (torch.randn(len(lengths), h, n, D, dtype=torch.float64).to(dtype) for h in (H, K, K))
    padding = ~tokens.valid[:, None, :, None]
    return *(x.masked_fill(padding, float("nan")) for x in (q, k, v)), tokens


def piece(x: Tensor, places: Tensor) -> Tensor:
    """Returns x [B, heads, n, D] at places [B, T]; NaN where a place is -1."""
    at = places.clamp_min(0)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, at).masked_fill((places < 0)[:, None, :, None], float("nan"))


def make_cache(pattern: Pattern, batch: int, dtype: torch.dtype, slack: int = 0) -> BatchCache:
    """Returns a cache of one layer."""
    spec = CacheSpec(kv_heads=K, head_dim=D, dtype=dtype)
    return BatchCache(PagedCache(spec, [pattern], slack=slack), batch)


def through(
    cache: BatchCache,
    pattern: Pattern,
    rows: tuple[Tensor, Tensor, Tensor, Tokens],
    split: list[list[int]],
    side: str,
    backend: str,
    score: tuple[Score, ...] = (),
) -> Tensor:
    """Computes attention of all queries through the cache, chunk by chunk: [B, H, n, D], 0 where there is no token."""
    q, k, v, tokens = rows
    out = torch.zeros(q.shape, dtype=q.dtype)
    for counts in split:
        chunk = cache.next_tokens(max(counts), counts, side)
        places = chunk.index.expand(cache.batch, -1)
        marks = tokens.globals.gather(1, places.clamp_min(0)) & (places >= 0)
        qkv = (piece(x, places) for x in (q, k, v))
        part = attended(cache, replace(chunk, is_global=marks), *qkv, pattern, backend, score)
        b, t = (places >= 0).nonzero(as_tuple=True)
        out[b, :, places[b, t]] = part[b, :, t]
    return out


def truth(pattern: Pattern, rows: tuple[Tensor, Tensor, Tensor, Tokens], dtype: torch.dtype) -> Tensor:
    q, k, v, tokens = (*(x.nan_to_num(0.0).to(dtype) for x in rows[:3]), rows[3])
    return naive(q, k, v, pattern, tokens, tokens)


@given(
    pattern=decoder_patterns,
    data=st.data(),
    slack=st.integers(0, 3),
    side=st.sampled_from(["left", "right"]),
    backend=st.sampled_from(["auto", "dense", "sdpa", "banded"]),
)
def test_any_decoder_pattern_in_any_split(
    pattern: Pattern, data: st.DataObject, slack: int, side: str, backend: str
) -> None:
    assume(pattern.is_causal)
    lengths = data.draw(
        st.lists(st.integers(1, 16) | st.integers(PAGE - 3, PAGE + 12), min_size=1, max_size=3)
    )
    if data.draw(st.booleans()):
        lengths = [max(lengths)] * len(lengths)
    share = data.draw(st.sampled_from([0.0, 0.2, 1.0]))
    rows = rows_of(lengths, torch.rand(len(lengths), max(lengths)) < share, torch.float64)
    cache = make_cache(pattern, len(lengths), torch.float64, slack)
    actual = through(cache, pattern, rows, data.draw(splits(lengths)), side, backend)
    expected = truth(pattern, rows, torch.float64)
    assert_within_reference(actual, expected, expected, str(pattern))


W = 8
DECODERS = [
    Causal(),
    Window.last(W),
    Window.last(3, step=3),
    Window.last(W) | Causal() & Sink(3),
    Window.last(W) | Causal() & GlobalKeys(),
    Window.last(W) | Window.last(3, step=6) | Causal() & (Sink(2) | GlobalKeys()),
    PerHead(Window.last(W), Window.last(3, step=3), Causal(), Causal() & Sink(1)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["auto", "dense", "sdpa", "banded"])
@pytest.mark.parametrize("pattern", DECODERS, ids=str)
def test_prefill_then_tokens_around_the_window(pattern: Pattern, backend: str, dtype: torch.dtype) -> None:
    """Prompts about as long as the window or a page, then single tokens, or also a chunk longer than the window."""
    for prompt in (W - 1, PAGE - 1, PAGE, PAGE + W - 3):
        n = prompt + W + 4
        rows = rows_of([n, n], torch.rand(2, n) < 0.1, dtype)
        exact, low = truth(pattern, rows, torch.float64), truth(pattern, rows, dtype)
        for split in ([prompt, *[1] * (W + 4)], [prompt, 1, W + 2, 1]):
            cache = make_cache(pattern, 2, dtype)
            chunks = [[c, c] for c in split]
            actual = through(cache, pattern, rows, chunks, "right", backend)
            assert_within_reference(actual, exact, low, f"{pattern} {split}")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pattern", DECODERS, ids=str)
def test_ragged_prompts_then_tokens(pattern: Pattern, side: str) -> None:
    prompts, steps = [PAGE + 1, 1, PAGE - W, 5], W + 4
    lengths = [n + steps for n in prompts]
    rows = rows_of(lengths, torch.rand(4, max(lengths)) < 0.1, torch.float32)
    cache = make_cache(pattern, 4, torch.float32)
    actual = through(cache, pattern, rows, [prompts, *[[1] * 4] * steps], side, "auto")
    assert_within_reference(actual, truth(pattern, rows, torch.float64), truth(pattern, rows, torch.float32))
    for b, n in enumerate(lengths):
        q, k, v, tokens = rows
        alone = (*(x[b : b + 1, :, :n] for x in (q, k, v)), tokens.select_rows(torch.tensor([b])).slice(0, n))
        cache = make_cache(pattern, 1, torch.float32)
        single = through(cache, pattern, alone, [[prompts[b]], *[[1]] * steps], side, "auto")
        exact, low = truth(pattern, alone, torch.float64), truth(pattern, alone, torch.float32)
        assert_within_reference(single, exact, low)
        assert_within_reference(actual[b : b + 1, :, :n], exact, low)


@pytest.mark.parametrize("pattern", DECODERS[:6], ids=str)
def test_scores_measure_indices_not_slots(pattern: Pattern) -> None:
    """With ALiBi and released pages: scores depend on the distance of tokens, not on the slots that hold them."""
    n, score = PAGE + 3 * W, (ALiBi(), SoftCap(3.0))
    rows = rows_of([n], torch.rand(1, n) < 0.1, torch.float64)
    q, k, v, tokens = rows
    expected = attend(q, k, v, pattern, q_tokens=tokens, k_tokens=tokens, score=score, backend="dense")
    cache = make_cache(pattern, 1, torch.float64)
    actual = through(cache, pattern, rows, [[PAGE + 3], *[[1]] * (3 * W - 3)], "right", "auto", score)
    assert_within_reference(actual, expected, expected)


@pytest.mark.parametrize("pattern", DECODERS, ids=str)
def test_what_a_cache_returns_merges_from_any_parts(pattern: Pattern) -> None:
    """A cache's keys, split into any parts and attended over separately, merge to the same result."""
    n = PAGE + 2 * W + 3
    q, k, v, tokens = rows_of([n], torch.rand(1, n) < 0.1, torch.float64)
    cache = make_cache(pattern, 1, torch.float64)
    attended(cache, tokens.slice(0, n - 4), *(x[:, :, : n - 4] for x in (q, k, v)), pattern)
    with cache.step(tokens.slice(n - 4, n)) as packed:
        layer, at = cache.pages[0], packed.tokens
        assert isinstance(layer, PagedLayer)
        keys = layer.update(k[:, :, n - 4 :], v[:, :, n - 4 :], at).gathered()
    slots = torch.randperm(keys.tokens.count)
    parts = [
        KeyValues(keys.k[:, :, part], keys.v[:, :, part], keys.tokens.gather(part.unsqueeze(0)))
        for part in (slots[:5], slots[5:5], slots[5:])
    ]
    whole, merged = (attend_keys(q[:, :, n - 4 :], at, s, pattern) for s in ([keys], parts))
    assert_within_reference(merged.out, whole.out, whole.out)
    torch.testing.assert_close(merged.lse, whole.lse, rtol=1e-13, atol=1e-13)
    expected = naive(q, k, v, pattern, tokens, tokens)[:, :, n - 4 :]
    assert_within_reference(whole.out, expected, expected)


@pytest.mark.parametrize("pattern", DECODERS, ids=str)
def test_beams_keep_their_own_past(pattern: Pattern) -> None:
    """Beams reordered at every step attend over their own ancestors' tokens, also as the number of beams changes."""
    cache, prompt = make_cache(pattern, 1, torch.float64), PAGE - W
    pick = torch.Generator().manual_seed(1)
    past = [torch.randn(1, h, prompt, D, dtype=torch.float64) for h in (H, K, K)]
    marks = torch.rand(1, prompt, generator=pick) < 0.1
    attended(cache, cache.next_tokens(prompt).with_global(marks), *past, pattern)
    for at, beams in enumerate([1, 4, 4, 3, 3, 5, *[4] * (2 * W), 2, 2], prompt):
        parents = torch.randint(past[0].shape[0], (beams,), generator=pick)
        cache.reorder(parents)
        new = [torch.randn(beams, h, 1, D, dtype=torch.float64) for h in (H, K, K)]
        past = [torch.cat([before[parents], x], 2) for before, x in zip(past, new, strict=True)]
        marks = torch.cat([marks[parents], torch.rand(beams, 1, generator=pick) < 0.1], 1)
        q, k, v = new
        actual = attended(cache, Tokens.range(1, start=at).with_global(marks[:, -1:]), q, k, v, pattern)
        whole = Tokens.range(at + 1).with_global(marks)
        expected = naive(*past, pattern, whole, whole)[:, :, -1:]
        assert_within_reference(actual, expected, expected, f"token {at}")


@pytest.mark.parametrize("pattern", DECODERS, ids=str)
def test_drafts_that_are_taken_back_leave_no_trace(pattern: Pattern) -> None:
    """Speculative decoding: some drafts of each chunk are rejected, and decoding continues from the accepted ones."""
    slack, n, begin, accept = 3, PAGE + 3 * W, PAGE - W, 0
    rows = rows_of([n, n], torch.rand(2, n) < 0.1, torch.float64)
    q, k, v, tokens = rows
    cache = make_cache(pattern, 2, torch.float64, slack)
    expected = truth(pattern, rows, torch.float64)
    attended(cache, tokens.slice(0, begin), *(x[:, :, :begin] for x in (q, k, v)), pattern)
    while begin + slack + 1 <= n:
        noise = [torch.randn(2, K, slack, D, dtype=torch.float64) for _ in "kv"]
        draft = [
            torch.cat([x[:, :, begin : begin + 1 + accept], y[:, :, accept:]], 2)
            for x, y in zip((k, v), noise, strict=True)
        ]
        chunk = slice(begin, begin + slack + 1)
        actual = attended(
            cache, tokens.slice(chunk.start, chunk.stop), q[:, :, chunk], draft[0], draft[1], pattern
        )
        good = slice(begin, begin + 1 + accept)
        assert_within_reference(actual[:, :, : 1 + accept], expected[:, :, good], expected[:, :, good])
        cache.trim(slack - accept)
        begin, accept = begin + 1 + accept, (accept + 1) % (slack + 1)


def test_choices_follow_the_patterns() -> None:
    assert [choose_cache(p).what for p in DECODERS] == ["growing", *["window"] * 5, "growing"]
