"""Prefill in any split, then token by token, equals one full forward: against an oracle of pairs in float64.

Keys are summed in another order, so results differ by rounding only: fewer than 64 terms of size about 1 give
less than 64 * 2**-53 * a few, far below 1e-13.
"""

import pytest
import torch
from torch import Tensor

from headway.cache import CacheSpec, KVCache, make_cache
from headway.tokens import Tokens
from tests.cache.oracle import (
    CASES,
    GLOBAL_CASES,
    KV_HEADS,
    SIZE,
    Case,
    Rows,
    W,
    attend_pairs,
    cuts,
)

EXACT = {"rtol": 0.0, "atol": 1e-13}


def new_cache(
    case: Case, batch: int, slack: int = 0, kind: str = "auto", dtype: torch.dtype = torch.float64
) -> KVCache:
    return make_cache(
        case.pattern,
        CacheSpec(batch=batch, kv_heads=KV_HEADS, head_dim=SIZE, dtype=dtype),
        slack=slack,
        kind=kind,
    )


def poison(cache: KVCache) -> None:
    """Slots that hold no token hold NaN: in int8, in their scale."""
    empty = cache.table.tokens.index < 0
    for t in cache.tensors:
        if t.is_floating_point():
            t.transpose(1, 2)[empty] = float("nan")


def check_start(tokens: Tokens) -> None:
    """Where `start` is said, it is so."""
    if tokens.start is not None:
        assert torch.equal(
            tokens.index, Tokens.range(tokens.count, tokens.start).index.expand_as(tokens.index)
        )


def globals_seen(rows: Rows, ends: list[int]) -> int:
    return max(int(rows.is_global[b, :end].sum()) for b, end in enumerate(ends))


def run(
    case: Case,
    rows: Rows,
    plan: list[list[int]],
    *,
    slack: int = 0,
    kind: str = "auto",
    side: str = "right",
    extra: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The rows through a cache, plan[c][b] tokens of row b in chunk c: [B, H, n, D]."""
    cache = new_cache(case, len(rows.lengths), slack, kind, dtype)
    out = torch.zeros_like(rows.full(case))
    ends = [0] * len(rows.lengths)
    for counts in plan:
        q, k, v, tokens, places = rows.chunk(ends, counts, side, extra)
        keys = cache.update(k, v, tokens).dequantized(torch.float64)
        check_start(keys.tokens)
        got = attend_pairs(case, q, tokens, keys.k, keys.v, keys.tokens)
        b, t = (places >= 0).nonzero(as_tuple=True)
        out[b, :, places[b, t]] = got[b, :, t]
        ends = [end + n for end, n in zip(ends, counts, strict=True)]
        assert cache.length.tolist() == ends
        if case.slots is not None and cache.bound is not None:
            limit = case.slots + slack
            assert cache.capacity <= limit or rows.is_global.any()
            assert cache.slots <= cache.bound <= limit + globals_seen(rows, ends)
        poison(cache)
    return out


def uniform(cut: list[int], batch: int) -> list[list[int]]:
    return [[size] * batch for size in cut]


@pytest.mark.parametrize("n", [W - 1, W, W + 1, 2 * W, 3 * W + 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_split_equals_one_forward(case: Case, n: int) -> None:
    rows = Rows.draw([n, n])
    full = rows.full(case)
    for slack, cut in [(i % 3, cut) for i, cut in enumerate(cuts(n))]:
        out = run(case, rows, uniform(cut, 2), slack=slack)
        torch.testing.assert_close(out, full, **EXACT, msg=lambda m, cut=cut: f"{cut}: {m}")


@pytest.mark.parametrize("case", [c for c in CASES if c.slots is not None], ids=str)
def test_a_growing_cache_serves_every_pattern(case: Case) -> None:
    rows = Rows.draw([13, 13])
    for cut in cuts(13):
        out = run(case, rows, uniform(cut, 2), kind="growing")
        torch.testing.assert_close(out, rows.full(case), **EXACT)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_global_tokens(case: Case) -> None:
    rows = Rows.draw([2 * W + 1] * 2)
    rows = Rows(rows.q, rows.k, rows.v, torch.zeros_like(rows.is_global), rows.lengths)
    for cut in cuts(2 * W + 1):
        torch.testing.assert_close(run(case, rows, uniform(cut, 2)), rows.full(case), **EXACT)


@pytest.mark.parametrize("case", GLOBAL_CASES, ids=str)
def test_when_every_token_is_global(case: Case) -> None:
    rows = Rows.draw([2 * W + 1] * 2)
    rows = Rows(rows.q, rows.k, rows.v, torch.ones_like(rows.is_global), rows.lengths)
    for cut in cuts(2 * W + 1):
        torch.testing.assert_close(run(case, rows, uniform(cut, 2)), rows.full(case), **EXACT)


@pytest.mark.parametrize("side", [pytest.param("left", marks=pytest.mark.slow), "right", "between"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ragged_rows_equal_one_forward_and_themselves_alone(case: Case, side: str) -> None:
    lengths = [3 * W + 1, W, 1, 2 * W + 2]
    rows = Rows.draw(lengths, seed=1)
    full = rows.full(case)
    pick = torch.Generator().manual_seed(len(side))
    plans = [[list(lengths)]]
    for width in (1, 3, W + 2):
        plan, left = [], list(lengths)
        while any(left):
            counts = [min(n, int(torch.randint(0, width + 1, (), generator=pick))) for n in left]
            left = [n - c for n, c in zip(left, counts, strict=True)]
            plan.append(counts)
        plans.append(plan)
    for slack, plan in enumerate(plans):
        out = run(case, rows, plan, slack=slack, side=side, extra=slack % 2)
        torch.testing.assert_close(out, full, **EXACT)
    for b, n in enumerate(lengths):
        alone = Rows(
            *(x[b : b + 1, :, :n] for x in (rows.q, rows.k, rows.v)), rows.is_global[b : b + 1, :n], (n,)
        )
        torch.testing.assert_close(run(case, alone, [[1]] * n)[0], full[b, :, :n], **EXACT)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_long_row_then_a_short_one_equals_a_fresh_cache(case: Case) -> None:
    """Nothing of an earlier prompt is left behind once it has been taken back."""
    long, short = Rows.draw([4 * W], seed=2), Rows.draw([W + 1], seed=3)
    cache = new_cache(case, 1)
    for begin in range(4 * W):
        _, k, v, tokens, _ = long.chunk([begin], [1])
        cache.update(k, v, tokens)
    cache.trim(4 * W)
    fresh = new_cache(case, 1)
    for begin in range(W + 1):
        q, k, v, tokens, _ = short.chunk([begin], [1])
        old, new = cache.update(k, v, tokens), fresh.update(k, v, tokens)
        a, b = (attend_pairs(case, q, tokens, s.k, s.v, s.tokens) for s in (old, new))
        torch.testing.assert_close(a, b, **EXACT)
        torch.testing.assert_close(a[0, :, 0], short.full(case)[0, :, begin], **EXACT)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_empty_chunk_changes_nothing(case: Case) -> None:
    rows = Rows.draw([2 * W, 2 * W])
    cache = new_cache(case, 2)
    nothing = torch.zeros(2, KV_HEADS, 0, SIZE, dtype=torch.float64)
    assert cache.update(nothing, nothing, Tokens.range(0)).tokens.count == 0
    _, k, v, tokens, _ = rows.chunk([0, 0], [2 * W] * 2)
    cache.update(k, v, tokens)
    before = cache.fork()
    cache.update(nothing, nothing, Tokens.range(0, start=2 * W))
    padding = torch.full((2, KV_HEADS, 3, SIZE), float("nan"), dtype=torch.float64)
    cache.update(padding, padding, Tokens(torch.full((2, 3), -1)))
    assert cache.length.tolist() == [2 * W] * 2
    assert torch.equal(cache.table.tokens.index, before.table.tokens.index)
    assert torch.equal(cache.tensors[0], before.tensors[0])


def test_the_oracle_can_fail() -> None:
    """A window that is wider or narrower by one changes the result far beyond the tolerance."""
    rows = Rows.draw([3 * W] * 2)
    for case, wrong in ((CASES[1], W - 1), (CASES[1], W + 1)):
        other = Case(case.pattern, lambda h, i, j, q, k, w=wrong: (j <= i) & (i - j < w), case.slots)
        assert (rows.full(case) - rows.full(other)).abs().max() > 1e-2
