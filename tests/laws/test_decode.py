"""Decoding through a cache is one full forward, whatever the pattern, the split and the padding.

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
from headway.cache import CacheSpec, KVCache, choose_cache, make_cache
from headway.patterns import Causal, GlobalKeys, Pattern, PerHead, Sink, Window
from headway.positions import DynamicNTK, Rotary
from headway.scores import ALiBi, Score, SoftCap
from headway.tokens import Tokens
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
    """Chunks that bring each row to its length: counts per row, some of them 0."""
    most = draw(st.sampled_from([1, 2, 5, 30]))
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
    """q, k, v [B, heads, n, D] (NaN behind a row's end) and their tokens."""
    n = max(lengths)
    tokens = Tokens.from_lengths(lengths, n)
    tokens = replace(tokens, is_global=marks & tokens.valid)
    q, k, v = (torch.randn(len(lengths), h, n, D, dtype=torch.float64).to(dtype) for h in (H, K, K))
    gone = ~tokens.valid[:, None, :, None]
    return *(x.masked_fill(gone, float("nan")) for x in (q, k, v)), tokens


def piece(x: Tensor, places: Tensor) -> Tensor:
    """x [B, heads, n, D] at places [B, T]; NaN where a place is -1."""
    at = places.clamp_min(0)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, at).masked_fill((places < 0)[:, None, :, None], float("nan"))


def through(
    cache: KVCache,
    pattern: Pattern,
    rows: tuple[Tensor, Tensor, Tensor, Tokens],
    split: list[list[int]],
    side: str,
    backend: str,
    score: tuple[Score, ...] = (),
) -> Tensor:
    """What the rows' queries see, chunk by chunk: [B, H, n, D], 0 where there is no token."""
    q, k, v, tokens = rows
    out = torch.zeros(q.shape, dtype=q.dtype)
    for counts in split:
        width, begins = max(counts), cache.lengths
        places = torch.full((len(counts), width), -1)
        for b, (begin, n) in enumerate(zip(begins, counts, strict=True)):
            places[b, width - n if side == "left" else 0 :][:n] = torch.arange(begin, begin + n)
        regular = len(set(begins)) == 1 and len(set(counts)) == 1
        marks = tokens.globals.gather(1, places.clamp_min(0)) & (places >= 0)
        chunk = Tokens(places, is_global=marks, start=begins[0] if regular else None)
        keys = cache.update(piece(k, places), piece(v, places), chunk)
        part = attend_keys(piece(q, places), chunk, [keys], pattern, score=score, backend=backend)
        b, t = (places >= 0).nonzero(as_tuple=True)
        out[b, :, places[b, t]] = part.out[b, :, t]
    return out


def truth(pattern: Pattern, rows: tuple[Tensor, Tensor, Tensor, Tokens], dtype: torch.dtype) -> Tensor:
    q, k, v, tokens = (*(x.nan_to_num(0.0).to(dtype) for x in rows[:3]), rows[3])
    return naive(q, k, v, pattern, tokens, tokens)


@given(
    pattern=decoder_patterns,
    data=st.data(),
    slack=st.integers(0, 3),
    growing=st.booleans(),
    side=st.sampled_from(["left", "right"]),
    backend=st.sampled_from(["auto", "dense", "sdpa", "banded"]),
)
def test_any_decoder_pattern_in_any_split(
    pattern: Pattern, data: st.DataObject, slack: int, growing: bool, side: str, backend: str
) -> None:
    assume(pattern.is_causal)
    lengths = data.draw(st.lists(st.integers(1, 26), min_size=1, max_size=3))
    if data.draw(st.booleans()):
        lengths = [max(lengths)] * len(lengths)
    share = data.draw(st.sampled_from([0.0, 0.2, 1.0]))
    rows = rows_of(lengths, torch.rand(len(lengths), max(lengths)) < share, torch.float64)
    cache = make_cache(
        pattern,
        CacheSpec(batch=len(lengths), kv_heads=K, head_dim=D, dtype=torch.float64),
        slack=slack,
        kind="growing" if growing else "auto",
    )
    got = through(cache, pattern, rows, data.draw(splits(lengths)), side, backend)
    want = truth(pattern, rows, torch.float64)
    assert_within_reference(got, want, want, str(pattern))
    assert growing or cache.bound is None or cache.slots <= cache.bound


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
    """Prompts of w - 1, w, w + 1 and 2 w tokens, then one by one; a chunk longer than the window in between."""
    for prompt in (W - 1, W, W + 1, 2 * W):
        n = prompt + W + 4
        rows = rows_of([n, n], torch.rand(2, n) < 0.1, dtype)
        exact, low = truth(pattern, rows, torch.float64), truth(pattern, rows, dtype)
        for split in ([prompt, *[1] * (W + 4)], [prompt, 1, W + 2, 1]):
            cache = make_cache(pattern, CacheSpec(batch=2, kv_heads=K, head_dim=D, dtype=dtype))
            chunks = [[c, c] for c in split]
            got = through(cache, pattern, rows, chunks, "right", backend)
            assert_within_reference(got, exact, low, f"{pattern} {split}")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pattern", DECODERS, ids=str)
def test_ragged_prompts_then_tokens(pattern: Pattern, side: str) -> None:
    prompts, steps = [W + 9, 1, W, 5], W + 4
    lengths = [n + steps for n in prompts]
    rows = rows_of(lengths, torch.rand(4, max(lengths)) < 0.1, torch.float32)
    cache = make_cache(pattern, CacheSpec(batch=4, kv_heads=K, head_dim=D))
    got = through(cache, pattern, rows, [prompts, *[[1] * 4] * steps], side, "auto")
    assert_within_reference(got, truth(pattern, rows, torch.float64), truth(pattern, rows, torch.float32))
    for b, n in enumerate(lengths):
        q, k, v, tokens = rows
        alone = (*(x[b : b + 1, :, :n] for x in (q, k, v)), tokens.select_rows(torch.tensor([b])).slice(0, n))
        cache = make_cache(pattern, CacheSpec(batch=1, kv_heads=K, head_dim=D))
        single = through(cache, pattern, alone, [[prompts[b]], *[[1]] * steps], side, "auto")
        exact, low = truth(pattern, alone, torch.float64), truth(pattern, alone, torch.float32)
        assert_within_reference(single, exact, low)
        assert_within_reference(got[b : b + 1, :, :n], exact, low)


@pytest.mark.parametrize("pattern", DECODERS[:6], ids=str)
def test_scores_measure_indices_not_slots(pattern: Pattern) -> None:
    """ALiBi through a ring that has wrapped: the distance of two tokens, wherever they are kept."""
    n, score = 3 * W, (ALiBi(), SoftCap(3.0))
    rows = rows_of([n], torch.rand(1, n) < 0.1, torch.float64)
    q, k, v, tokens = rows
    want = attend(q, k, v, pattern, q_tokens=tokens, k_tokens=tokens, score=score, backend="dense")
    cache = make_cache(pattern, CacheSpec(batch=1, kv_heads=K, head_dim=D, dtype=torch.float64))
    got = through(cache, pattern, rows, [[W + 3], *[[1]] * (2 * W - 3)], "right", "auto", score)
    assert_within_reference(got, want, want)


@pytest.mark.parametrize("pairing", ["halves", "adjacent"])
@pytest.mark.parametrize("pattern", DECODERS, ids=str)
def test_keys_rotated_before_or_after_storing_are_the_same(pattern: Pattern, pairing: str) -> None:
    """The tokens of a slot keep their position, which need not be their index."""
    n, rotary = 2 * W + 5, Rotary(pairing=pairing)
    q, k, v, tokens = rows_of([n, n], torch.rand(2, n) < 0.1, torch.float64)
    tokens = tokens.with_position(torch.stack([torch.arange(n) + 7, 3 * torch.arange(n)]))
    early, late = (
        make_cache(pattern, CacheSpec(batch=2, kv_heads=K, head_dim=D, dtype=torch.float64)) for _ in range(2)
    )
    turned = [rotary.rotate(x, tokens.positions) for x in (q, k)]
    want = naive(*turned, v, pattern, tokens, tokens)
    begin = 0
    for size in (3, W + 1, *[1] * (W + 1)):
        at = tokens.slice(begin, begin + size)
        q_at = rotary.rotate(q[:, :, begin : begin + size], at.positions)
        k_at, v_at = (x[:, :, begin : begin + size] for x in (k, v))
        a = early.update(rotary.rotate(k_at, at.positions), v_at, at)
        b = late.update(k_at, v_at, at)
        b = KeyValues(rotary.rotate(b.k, b.tokens.positions), b.v, b.tokens)
        for keys in (a, b):
            got = attend_keys(q_at, at, [keys], pattern).out
            assert_within_reference(got, want[:, :, begin : begin + size], want[:, :, begin : begin + size])
        begin += size


def test_angles_that_depend_on_the_length_of_each_row() -> None:
    """Unrotated keys, turned on reading by each row's own length: the last query = the full forward's."""
    rotary = Rotary(pairing="halves", scaling=DynamicNTK(4.0, trained_context=8))
    lengths = [20, 6]
    q, k, v, _ = rows_of(lengths, torch.zeros(2, 20, dtype=torch.bool), torch.float64)
    cache = make_cache(Causal(), CacheSpec(batch=2, kv_heads=K, head_dim=D, dtype=torch.float64))
    cache.update(k[:, :, :18], v[:, :, :18], Tokens.from_lengths([18, 5], 18))
    places = torch.tensor([[18], [5]])
    for _ in range(2):
        at = Tokens(places)
        keys = cache.update(piece(k, places), piece(v, places), at)
        turned = rotary.rotate(keys.k, keys.tokens.positions, cache.length)
        q_at = rotary.rotate(piece(q, places), at.positions, cache.length)
        got = attend_keys(q_at, at, [KeyValues(turned, keys.v, keys.tokens)], Causal()).out
        for b in (0, 1):
            n = int(cache.length[b])
            if places[b, 0] < 0:
                continue
            whole = Tokens.range(n)
            x, y = (rotary.rotate(t[b : b + 1, :, :n], whole.positions, n) for t in (q, k))
            want = naive(x, y, v[b : b + 1, :, :n], Causal(), whole, whole)[:, :, -1:]
            assert_within_reference(got[b : b + 1], want, want)
        places = torch.tensor([[19], [-1]])


@pytest.mark.parametrize("pattern", DECODERS, ids=str)
def test_what_a_cache_returns_merges_from_any_parts(pattern: Pattern) -> None:
    """Cache and chunk are key sets like any others: attended over apart and merged, they give the same."""
    n = 2 * W + 3
    q, k, v, tokens = rows_of([n, n], torch.rand(2, n) < 0.1, torch.float64)
    cache = make_cache(pattern, CacheSpec(batch=2, kv_heads=K, head_dim=D, dtype=torch.float64))
    cache.update(k[:, :, : n - 4], v[:, :, : n - 4], tokens.slice(0, n - 4))
    at = tokens.slice(n - 4, n)
    keys = cache.update(k[:, :, n - 4 :], v[:, :, n - 4 :], at)
    slots = torch.randperm(keys.tokens.count)
    parts = [
        KeyValues(keys.k[:, :, some], keys.v[:, :, some], keys.tokens.gather(some.unsqueeze(0)))
        for some in (slots[:5], slots[5:5], slots[5:])
    ]
    one, many = (attend_keys(q[:, :, n - 4 :], at, s, pattern) for s in ([keys], parts))
    assert_within_reference(many.out, one.out, one.out)
    torch.testing.assert_close(many.lse, one.lse, rtol=1e-13, atol=1e-13)
    want = naive(q, k, v, pattern, tokens, tokens)[:, :, n - 4 :]
    assert_within_reference(one.out, want, want)


@pytest.mark.parametrize("pattern", DECODERS, ids=str)
def test_beams_keep_their_own_past(pattern: Pattern) -> None:
    """Rows that are chosen anew at every step see what their own ancestors were given; also as the number of
    beams changes."""
    cache = make_cache(pattern, CacheSpec(batch=1, kv_heads=K, head_dim=D, dtype=torch.float64))
    pick = torch.Generator().manual_seed(1)
    past = [torch.zeros(1, h, 0, D, dtype=torch.float64) for h in (H, K, K)]
    marks = torch.zeros(1, 0, dtype=torch.bool)
    for step, beams in enumerate([1, 4, 4, 3, 3, 5, *[4] * (2 * W), 2, 2]):
        parents = torch.randint(past[0].shape[0], (beams,), generator=pick)
        cache.reorder(parents)
        new = [torch.randn(beams, h, 1, D, dtype=torch.float64) for h in (H, K, K)]
        past = [torch.cat([old[parents], x], 2) for old, x in zip(past, new, strict=True)]
        marks = torch.cat([marks[parents], torch.rand(beams, 1, generator=pick) < 0.1], 1)
        at = Tokens.range(1, start=step).with_global(marks[:, -1:])
        keys = cache.update(new[1], new[2], at)
        got = attend_keys(new[0], at, [keys], pattern).out
        whole = Tokens.range(step + 1).with_global(marks)
        want = naive(*past, pattern, whole, whole)[:, :, -1:]
        assert_within_reference(got, want, want, f"step {step}")


@pytest.mark.parametrize("pattern", DECODERS, ids=str)
def test_drafts_that_are_taken_back_leave_no_trace(pattern: Pattern) -> None:
    """Speculative decoding: a chunk of drafts is attended over, some are refused, the rest goes on from there."""
    slack, n = 3, 3 * W
    rows = rows_of([n, n], torch.rand(2, n) < 0.1, torch.float64)
    q, k, v, tokens = rows
    cache = make_cache(pattern, CacheSpec(batch=2, kv_heads=K, head_dim=D, dtype=torch.float64), slack=slack)
    want = truth(pattern, rows, torch.float64)
    cache.update(k[:, :, :W], v[:, :, :W], tokens.slice(0, W))
    begin, accept = W, 0
    while begin + slack + 1 <= n:
        noise = [torch.randn(2, K, slack, D, dtype=torch.float64) for _ in "kv"]
        draft = [
            torch.cat([x[:, :, begin : begin + 1 + accept], y[:, :, accept:]], 2)
            for x, y in zip((k, v), noise, strict=True)
        ]
        at = tokens.slice(begin, begin + slack + 1)
        keys = cache.update(*draft, at)
        got = attend_keys(q[:, :, begin : begin + slack + 1], at, [keys], pattern).out
        good = slice(begin, begin + 1 + accept)
        assert_within_reference(got[:, :, : 1 + accept], want[:, :, good], want[:, :, good])
        cache.trim(slack - accept)
        begin, accept = begin + 1 + accept, (accept + 1) % (slack + 1)


def test_choices_follow_the_patterns() -> None:
    assert [choose_cache(p).what for p in DECODERS] == ["growing", *["ring"] * 5, "growing"]
