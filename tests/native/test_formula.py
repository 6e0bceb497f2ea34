"""The native kernels of each CPU level against the formula."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.native.interface import MOST_SCORES
from headway.patterns import Causal, Full, Global, GlobalQueries, Pattern, Sink, Window
from headway.tokens import Tokens
from tests.native.calls import (
    DIMS,
    DROPOUT,
    DTYPES,
    HEADS,
    LENGTHS,
    PATTERNS,
    SCALES,
    SETS,
    STEPS,
    TOKENS,
    problem,
    steps,
)
from tests.native.conftest import BASES, OF_PAIRS, Use, at_levels, at_levels_and_dtypes
from tests.native.plain import NAMES, Problem, check, results
from tests.pairwise import chequered, pairwise
from tests.strategies import patterns, tokens
from tests.tolerance import ulp


def _cases() -> list[tuple[str, str, tuple[Any, ...]]]:
    """Returns cases in which any two of pattern, tokens, dtype and score meet; other settings are random."""
    rng = random.Random(0)
    cases = []
    for pattern, kind, dtype, score in pairwise(PATTERNS, TOKENS, DTYPES, STEPS):
        level, n, heads, dims = (rng.choice(axis) for axis in (BASES, LENGTHS, HEADS, DIMS))
        dropout, scale, sets = (rng.choice(axis) for axis in (DROPOUT, SCALES, SETS))
        words = level, pattern, kind, n, heads, dims, str(dtype)[6:], score, dropout, scale, sets
        call = pattern, kind, n, heads, dims, dtype, score, dropout, scale, sets
        cases.append(("-".join(map(str, words)), level, call))
    return cases


CASES = _cases()


@pytest.mark.parametrize(("level", "case"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_every_kind_of_call_equals_the_formula(use: Use, level: str, case: tuple[Any, ...]) -> None:
    use(level)
    check(problem(*case))


@pytest.mark.slow
@at_levels(0)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_level_and_width_equals_the_formula(
    use: Use, level: str, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    """Every pattern, with random other settings."""
    use(level)
    rng = random.Random(f"{level} {dims} {dtype}")
    for pattern in PATTERNS:
        kind, n, heads, score = (rng.choice(axis) for axis in (TOKENS, LENGTHS, HEADS, STEPS))
        check(problem(pattern, kind, n, heads, dims, dtype, score, rng.choice(DROPOUT)))


@at_levels(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_pattern_on_any_tokens_equals_the_formula(use: Use, level: str, dtype: torch.dtype) -> None:
    use(level)
    few, many = st.integers(1, 40), st.integers(60, 200)

    @given(patterns, st.one_of(tokens(few), tokens(many)), st.one_of(tokens(few), tokens(many)))
    def law(pattern: Pattern, q: Tokens, k: Tokens) -> None:
        if 1 in (q.rows, k.rows) or q.rows == k.rows:
            check(Problem.random(pattern, q, k, dtype, heads=(4, 2), dims=(8, 8)))

    law()


@at_levels(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_around_the_end_of_a_block_equal_the_formula(use: Use, level: str, dtype: torch.dtype) -> None:
    """The last block of 64 keys lacks one, is full, or has one: for a whole row of queries, and for one query."""
    use(level)
    for n in (63, 64, 65, 127, 191):
        for pattern, queries in ((Full(), n), (Causal(), n), (Window.around(66), n), (Causal(), 1)):
            q = Tokens.range(queries, start=n - queries)
            check(Problem.random(pattern, q, Tokens.range(n), dtype, 1, (2, 1), (32, 32)))


@at_levels(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_rows_in_many_parts_equal_the_formula(use: Use, level: str, dtype: torch.dtype) -> None:
    """Keys split over the threads, several chunks of tiles, irregular tiles, blocks that are packed again."""
    use(level)
    for queries, keys, heads, pattern in (
        (1, 3001, (8, 2), Full()),
        (5, 2500, (4, 1), Causal()),
        (1100, 1100, (2, 1), Window.last(65)),
        (1, 700, (4, 4), Window.last(600)),
    ):
        q = Tokens.range(queries, start=keys - queries)
        check(Problem.random(pattern, q, Tokens.range(keys), dtype, 1, heads, (64, 64)))


@at_levels_and_dtypes(4, DTYPES)
def test_queries_that_see_far_more_than_others_equal_the_formula(
    use: Use, level: str, dtype: torch.dtype
) -> None:
    """All pieces of the backward take these queries, each for a share of the keys: of one head and of several, in two
    tiles or three, at the front of each part of a dilated row, in some rows only, with keys that only they see."""
    use(level)
    base, every_tenth = Tokens.range(1100), list(range(0, 1100, 10))
    index = base.index.clone()
    index[:, 350:750] = -1
    for pattern, side, heads, options in (
        (Window.around(40) | Global(), base.with_global([0, 1, 750]), (2, 1), {}),
        (Window.around(40, step=2) | Global(), base.with_global([5, 100, 750]), (2, 2), {"scale": -0.3}),
        (
            Window.around(9) | GlobalQueries(),
            base.with_global([[7], []]),
            (2, 1),
            {"dropout": 0.3, "seed": 3},
        ),
        (Window.last(40) | Causal() & Sink(70) | GlobalQueries(), base.with_global(every_tenth), (2, 1), {}),
        (Window.around(9) | GlobalQueries(), base.with_global(list(range(0, 1100, 6))), (1, 1), {}),
        (Window.around(9) | GlobalQueries(), Tokens(index).with_global([4, 1000]), (1, 1), {}),
        (Window.around(150) | Global(), base.with_global([3, 9]), (2, 1), {"score": steps("table", 2)}),
    ):
        check(Problem.random(pattern, side, side, dtype, side.rows, heads, (16, 16), **options))


@at_levels(5)
@chequered("rows,dtype", range(1, 10), DTYPES)
def test_few_queries_of_long_rows_equal_the_formula(
    use: Use, level: str, dtype: torch.dtype, rows: int
) -> None:
    """Queries of one kv head in every number, against blocks that they see fully, in part and not at all; scores near
    0, far above and far below."""
    use(level)
    keys = Tokens.from_lengths([700, 389], 700, "left")
    last = Tokens(torch.tensor([[699], [388]]))
    dims = [(32, 32), (64, 64), (128, 96), (96, 160), (48, 64), (64, 48)][rows % 6]
    for pattern in (Causal(), Window.last(300) | Causal() & Sink(70)):
        check(Problem.random(pattern, last, keys, dtype, 2, (2 * rows, 2), dims))
    case = Problem.random(Full(), Tokens.range(rows), Tokens.range(700), dtype, 1, (2, 2), dims)
    check(case)
    k, q = case.k.clone(), case.q.clone()
    q[..., 0] = 10.0
    for size in (-10.0, 10.0):
        k[..., :200, 0] = size
        check(replace(case, q=q, k=k))
    q[..., 0], k[..., 0] = -300.0, 4.0
    far_below = replace(case, q=q, k=k)
    actual, expected = far_below.run(), far_below.to(torch.float64).formula()
    torch.testing.assert_close(actual.lse.double(), expected.lse, atol=0.01, rtol=1e-5)
    torch.testing.assert_close(actual.out.double(), expected.out, atol=0.05, rtol=0.05)


@at_levels(6)
@pytest.mark.parametrize("pattern", [Window.last(65), Window.around(40, step=3), Causal()], ids=str)
def test_long_rows_of_one_head_are_split_and_added_up(use: Use, level: str, pattern: Pattern) -> None:
    """Parts of the queries of one kv head, each with gradients of the keys that it reaches."""
    use(level)
    key_tokens = Tokens.from_lengths([2000, 700], 2000, "left") if pattern == Causal() else Tokens.range(2000)
    check(Problem.random(pattern, key_tokens, key_tokens, rows=key_tokens.rows, heads=(1, 1), dims=(16, 16)))


@at_levels(7)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [131, 1], ids=str)
def test_rows_whose_scores_lie_far_below_zero_are_computed_from_their_maximum(
    use: Use, level: str, dtype: torch.dtype, queries: int
) -> None:
    """Some rows of a tile have scores near -300 or -1e5, the others near 0, and those keep their bits."""
    use(level)
    case = problem(Causal(), "range", 4500 if queries == 1 else queries, (4, 2), (16, 16), dtype)
    case = replace(case, k=case.k.clone())
    case.k[..., 0] = 4.0
    if queries == 1:
        case = replace(case, q=case.q[:, :, :1].clone(), q_tokens=Tokens.range(1, start=4499))
    unchanged = case.run()
    low_q = case.q.clone()
    low_q[0, :, ::3, 0], low_q[1, :, ::3, 0] = -300.0, -1e5
    actual, expected = replace(case, q=low_q).run(), replace(case, q=low_q).to(torch.float64).formula()
    torch.testing.assert_close(actual.lse.double(), expected.lse, atol=0.01, rtol=1e-5)
    torch.testing.assert_close(actual.out.double(), expected.out, atol=0.05, rtol=0.05)
    other_rows = torch.arange(case.q.shape[2]) % 3 > 0
    assert torch.equal(actual.out[:, :, other_rows], unchanged.out[:, :, other_rows])


@at_levels(8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", [Causal(), Window.around(300)], ids=str)
def test_keys_in_stretches_give_every_query_its_whole_gradient(
    use: Use, level: str, dtype: torch.dtype, pattern: Pattern
) -> None:
    """Packed keys of this width exceed a cache, so that tiles are visited once for each stretch of keys."""
    use(level)
    key_tokens = Tokens.from_lengths([600, 211], 600, "left")
    check(Problem.random(pattern, key_tokens, key_tokens, dtype, 2, (2, 1), (256, 160)))


@at_levels(9)
def test_as_many_scores_as_there_may_be_get_each_its_gradient(use: Use, level: str) -> None:
    use(level)
    tables = tuple(step for _ in range(MOST_SCORES) for step in steps("table", 2))
    case = replace(problem(Causal(), "range", 97, (2, 1), (16, 16), torch.float32), more={"score": tables})
    d_out, d_lse = torch.randn(2, 2, 97, 16), torch.randn(2, 2, 97)
    native_results, exact_results = (
        results(c, method, d_out, d_lse)
        for c, method in ((case, "native"), (case.to(torch.float64), "formula"))
    )
    assert len(native_results) == 5 + MOST_SCORES
    for actual, expected in zip(native_results, exact_results, strict=True):
        torch.testing.assert_close(actual.double(), expected, atol=1e-4, rtol=1e-4)


# Relative error of the exponentials (csrc/vec.h), which is the absolute one of a logsumexp over a single key.
EXP_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1.3e-4}


@at_levels(10)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_of_any_size_keep_the_softmax(use: Use, level: str, dtype: torch.dtype) -> None:
    """Scores rise or fall by 128 a key: the running maximum is renewed, and all other weights underflow to 0."""
    use(level)
    index = torch.arange(300)
    k = torch.zeros(300, 16, dtype=dtype)
    k[:, 0], k[:, 9] = index // 16 * 2048, index % 16 * 128
    for sign in (1.0, -1.0):
        case = problem(Causal(), "range", 300, (2, 1), (16, 16), dtype, scale=sign)
        case = replace(case, k=k.expand(2, 1, -1, -1), q=torch.ones_like(case.q))
        actual = case.run()
        largest = index if sign > 0 else torch.zeros_like(index)
        torch.testing.assert_close(actual.out, case.v[:, :, largest].expand_as(actual.out))
        scores = (sign * case.k.float().sum(-1))[:, :, largest].expand_as(actual.lse)
        torch.testing.assert_close(actual.lse, scores, atol=EXP_ERROR[dtype], rtol=1.3e-6)


@at_levels(11)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_keep_their_weights_where_later_ones_of_a_block_outrun_them(
    use: Use, level: str, dtype: torch.dtype
) -> None:
    """Scores rise by 6 every 16 keys, so that the running maximum is renewed within blocks of 64: the keys before a
    renewal still have e^-6 of the weight."""
    use(level)
    case = problem(Causal(), "range", 131, (2, 1), (16, 16), dtype, scale=1.0)
    k = torch.zeros_like(case.k)
    k[..., 0] = torch.arange(131) // 16 * 6
    check(replace(case, k=k, q=torch.ones_like(case.q)))


@at_levels(12)
def test_rounded_weights_sum_to_1(use: Use, level: str) -> None:
    """Weights in bfloat16 are divided by the sum of the rounded ones: values that are all 1 stay 1, to the bit."""
    use(level)
    for pattern in (Window.last(2), Window.last(3), Window.around(7), Causal()):
        case = problem(pattern, "range", 300, (6, 2), (16, 16), torch.bfloat16)
        case = replace(case, v=torch.ones_like(case.v))
        assert (case.run().out == 1).all(), pattern


@at_levels(13)
def test_the_even_one_of_two_equally_near_numbers_is_written(use: Use, level: str) -> None:
    """Keys of 0 give equal weights; for a number of keys that is a power of two, sums of whole numbers are exact, and
    often halfway between two numbers of bf16. Levels whose exponential of 0 is not quite 1 are off by an ulp there."""
    use(level)
    for keys, queries, heads, dims in (
        (1, 3, (2, 1), (8, 8)),
        (2, 1, (4, 2), (64, 64)),
        (64, 131, (3, 1), (33, 40)),
        (128, 5, (2, 2), (32, 64)),
        (256, 97, (1, 1), (16, 129)),
    ):
        sizes = (heads[0], queries, dims[0]), (heads[1], keys, dims[0]), (heads[1], keys, dims[1])
        q, k, v = (torch.randint(-255, 256, (2, *size)).bfloat16() for size in sizes)
        case = Problem(q, 0 * k, v, Full(), Tokens.range(queries), Tokens.range(keys))
        d_out, d_lse = (
            torch.randint(-9, 10, (2, *sizes[0][:2], dims[1])).bfloat16(),
            torch.zeros(2, *sizes[0][:2]),
        )
        actual, expected = (
            results(c, method, d_out, d_lse)
            for c, method in ((case, "native"), (case.to(torch.float64), "formula"))
        )
        for index in (NAMES.index("out"), NAMES.index("dv")):
            error = (actual[index].double() - expected[index].bfloat16().double()).abs()
            tolerance = 0.0 if level in OF_PAIRS else ulp(expected[index], torch.bfloat16)
            assert bool((error <= tolerance).all()), (NAMES[index], keys, queries)
