"""The native kernels of each CPU level against the formula, and what they must never read, write or depend on."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.patterns import Causal, Full, Global, GlobalKeys, GlobalQueries, Pattern, Sink, Window
from headway.scores import ALiBi, RelativeBias, SoftCap
from headway.tokens import Tokens
from tests.native.conftest import LEVELS, Use
from tests.native.plain import Problem, check
from tests.pairwise import pairwise
from tests.strategies import patterns, tokens

PATTERNS: list[Pattern] = [
    Full(),
    Causal(),
    Window.last(5),
    Window.around(40),
    Window(2, 70),
    Window.last(30, step=3),
    Window.around(3, step=2),
    Window.last(60) | Causal() & Sink(3),
    Window.last(33, step=2) | Causal() & GlobalKeys(),
    Window.around(30) | Global(),
    Causal() | GlobalKeys() & GlobalQueries(),
    (Window.around(9) | Sink(2)) & (Causal() | GlobalKeys() | Window(0, 4)),
]
TOKENS = ["range", "chunk", "before", "ring", "left", "right", "packed", "global"]
LENGTHS = [1, 2, 17, 63, 97, 131, 200, 300]
HEADS = [(3, 3), (6, 2), (5, 1), (7, 1)]
DIMS = [(16, 16), (64, 64), (33, 33), (128, 128), (256, 256), (7, 9), (80, 40), (32, 129)]
DTYPES = [torch.float32, torch.bfloat16]
STEPS = ["none", "cap", "alibi", "table", "past", "both"]
DROPOUT = [0.0, 0.3]
SCALES = [None, 0.0, -0.3, 2.0]
SETS = ["one", "two"]


def sides(kind: str, n: int) -> tuple[Tokens, Tokens]:
    """Queries and keys: the same tokens, or a later chunk, queries before keys, a ring that has wrapped."""
    if kind in ("left", "right"):
        at = Tokens.from_lengths([n, n - n // 3], n, kind)
    elif kind == "packed":
        at = Tokens.packed([[n // 3, n - n // 3], [n // 2]], n)
    elif kind == "global":
        at = Tokens.range(n).with_global([[0, n // 2], [n - 1]])
    elif kind == "chunk":
        return Tokens.range(n // 4 + 1, start=n - n // 4 - 1), Tokens.range(n)
    elif kind == "before":
        return Tokens.range(n, start=3), Tokens.range(n + 5, start=n // 2)
    elif kind == "ring":
        ring = Tokens(torch.cat((torch.arange(n, n + n // 3), torch.arange(n // 3, n))).unsqueeze(0))
        return Tokens.range(3, start=max(0, n + n // 3 - 3)), ring
    else:
        at = Tokens.range(n)
    return at, at


def steps(kind: str, heads: int) -> tuple[SoftCap | ALiBi | RelativeBias, ...]:
    return {
        "none": (),
        "cap": (SoftCap(2.0),),
        "alibi": (ALiBi(),),
        "table": (RelativeBias(torch.randn(32, heads), bidirectional=True),),
        "past": (RelativeBias(torch.randn(16, heads), bidirectional=False, max_distance=30),),
        "both": (SoftCap(5.0), ALiBi(tuple(0.1 * h for h in range(heads))), SoftCap(9.0)),
    }[kind]


def problem(
    pattern: Pattern,
    kind: str,
    n: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    score: str = "none",
    dropout: float = 0.0,
    scale: float | None = None,
    sets: str = "one",
) -> Problem:
    q, k = sides(kind, n)
    more = {"score": steps(score, heads[0]), "dropout": dropout, "seed": 2**40 + n, "scale": scale}
    split = k.count // 3 if sets == "two" else None
    return Problem.random(pattern, q, k, dtype, heads=heads, dims=dims, split=split, **more)


def _cases() -> list[tuple[str, str, Problem]]:
    """Every two of pattern, tokens, dtype and score meet; everything else is drawn beside them."""
    draw = random.Random(0)
    torch.manual_seed(0)
    found = []
    for pattern, kind, dtype, score in pairwise(PATTERNS, TOKENS, DTYPES, STEPS):
        level, n, heads, dims = (draw.choice(axis) for axis in (LEVELS, LENGTHS, HEADS, DIMS))
        dropout, scale, sets = (draw.choice(axis) for axis in (DROPOUT, SCALES, SETS))
        made = problem(pattern, kind, n, heads, dims, dtype, score, dropout, scale, sets)
        words = level, pattern, kind, n, heads, dims, str(dtype)[6:], score, dropout, scale, sets
        found.append(("-".join(map(str, words)), level, made))
    return found


CASES = _cases()


@pytest.mark.parametrize(("level", "case"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_every_kind_of_call_equals_the_formula(use: Use, level: str, case: Problem) -> None:
    use(level)
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_level_and_width_equals_the_formula(
    use: Use, level: str, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    use(level)
    for i, (pattern, kind, score) in enumerate(pairwise(PATTERNS, TOKENS, STEPS)):
        n, heads = LENGTHS[i % len(LENGTHS)], HEADS[i % len(HEADS)]
        check(problem(pattern, kind, n, heads, dims, dtype, score, DROPOUT[i % 5 == 0]))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_pattern_on_any_tokens_equals_the_formula(use: Use, level: str, dtype: torch.dtype) -> None:
    use(level)
    few, many = st.integers(1, 40), st.integers(60, 200)

    @given(patterns, st.one_of(tokens(few), tokens(many)), st.one_of(tokens(few), tokens(many)))
    def law(pattern: Pattern, q: Tokens, k: Tokens) -> None:
        if 1 in (q.rows, k.rows) or q.rows == k.rows:
            check(Problem.random(pattern, q, k, dtype, heads=(4, 2), dims=(8, 8)))

    law()


# -- exactly what is visible ---------------------------------------------------------------------------------


def weights(case: Problem) -> Tensor:
    """[B, H, T, S]: the output where value j is the j-th unit vector."""
    rows, heads, keys, _ = case.k.shape
    eye = torch.eye(keys, dtype=case.q.dtype).expand(rows, heads, keys, keys)
    return replace(case, v=eye).run().out


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_are_0_exactly_where_a_key_is_not_visible(use: Use, level: str, dtype: torch.dtype) -> None:
    use(level)
    for pattern, kind in pairwise(PATTERNS, TOKENS):
        case = problem(pattern, kind, 131, (6, 2), (8, 8), dtype)
        assert torch.equal(weights(case) != 0, case.visible), (pattern, kind)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_dropout_drops_is_known_beforehand(use: Use, level: str, dtype: torch.dtype) -> None:
    """Bit for bit the words of attention/dropout.py: for any seed, number of keys before, and order of slots."""
    use(level)
    for kind, seed in zip(TOKENS, (0, 1, -5, 2**31, 2**40 + 7, 2**62, 3, 4), strict=True):
        case = problem(Window.around(70, step=2) | Global(), kind, 131, (6, 2), (8, 8), dtype)
        case = replace(case, more={"dropout": 0.4, "seed": seed})
        for split in (None, 50):
            seen = case.visible & (case.kept != 0)
            assert torch.equal(weights(replace(case, split=split)) != 0, seen), (kind, seed, split)


# -- what does not matter ------------------------------------------------------------------------------------


def outcome(case: Problem, threads: int = 1) -> list[Tensor]:
    """out, lse and the gradients of q, k and v for fixed gradients of both; with this many threads."""
    leaves = [t.detach().requires_grad_() for t in (case.q, case.k, case.v)]
    q, k, v = leaves
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        part = replace(case, q=q, k=k, v=v).run()
        given = torch.Generator().manual_seed(1)
        d_out = torch.randn(part.out.shape, generator=given).to(part.out.dtype)
        d_lse = torch.randn(part.lse.shape, generator=given)
        return [part.out, part.lse, *torch.autograd.grad((part.out, part.lse), leaves, (d_out, d_lse))]
    finally:
        torch.set_num_threads(before)


def equal(a: list[Tensor], b: list[Tensor]) -> None:
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), a, b, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_slots_that_are_empty_or_unseen_may_hold_anything(
    use: Use, level: str, dtype: torch.dtype, bad: float
) -> None:
    use(level)
    for pattern, kind in ((Causal(), "left"), (Window.around(9), "right"), (Window.last(20), "chunk")):
        case = problem(pattern, kind, 131, (6, 2), (33, 33), dtype)
        unseen = ~case.visible.any(1).any(1)[:, None, :, None]
        idle = ~case.q_tokens.valid[:, None, :, None]
        assert unseen.any()
        k, v = (t.masked_fill(unseen, bad) for t in (case.k, case.v))
        equal(outcome(replace(case, k=k, v=v, q=case.q.masked_fill(idle, bad))), outcome(case))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_key_or_value_spoils_only_the_queries_that_see_it(
    use: Use, level: str, dtype: torch.dtype, bad: float
) -> None:
    use(level)
    for pattern in (Causal(), Window.last(40), Window.around(9, step=3) | Sink(1) & Causal()):
        case = problem(pattern, "range", 131, (6, 2), (64, 64), dtype)
        clean = outcome(case)
        for at in (0, 50, 130):
            sees = case.visible[..., at]
            for name in ("k", "v"):
                t = getattr(case, name).clone()
                t[:, :, at, 5] = bad
                got = replace(case, **{name: t}).run()
                assert torch.equal(got.out[~sees], clean[0][~sees]), (pattern, at, name)
                assert torch.equal(got.lse[~sees], clean[1][~sees]), (pattern, at, name)
                assert not got.out[..., 5][sees].isfinite().any() or bad < 0 or name == "k"
                if bad != bad:
                    wrong = got.out if name == "k" else got.out[..., 5]
                    assert wrong[sees].isnan().all(), (pattern, at, name)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_query_spoils_only_itself_and_the_keys_that_it_sees(
    use: Use, level: str, dtype: torch.dtype, bad: float
) -> None:
    use(level)
    for pattern in (Causal(), Window.last(40), Window.around(9, step=3)):
        case = problem(pattern, "range", 131, (6, 2), (64, 64), dtype)
        clean = outcome(case)
        for at in (0, 50, 130):
            q = case.q.clone()
            q[:, :, at, 5] = bad
            out, lse, dq, dk, dv = outcome(replace(case, q=q))
            other, unseen = torch.arange(131) != at, ~case.visible[0, 0, at]
            for got, kept in zip((out, lse, dq), clean[:3], strict=True):
                assert torch.equal(got[:, :, other], kept[:, :, other]), (pattern, at)
            for got, kept in zip((dk, dv), clean[3:], strict=True):
                assert torch.equal(got[:, :, unseen], kept[:, :, unseen]), (pattern, at)
            assert not out[:, :, at].isfinite().all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bad_gradient_spoils_only_its_query_and_the_keys_that_it_sees(
    use: Use, level: str, dtype: torch.dtype
) -> None:
    use(level)
    for pattern in (Causal(), Window.last(40), Window.around(9, step=3)):
        case = problem(pattern, "range", 131, (6, 2), (64, 64), dtype)
        leaves = [t.requires_grad_() for t in (case.q, case.k, case.v)]
        out, d_out = case.run().out, torch.randn(2, 6, 131, 64).to(dtype)
        clean = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        for at in (0, 50, 130):
            wrong = d_out.clone()
            wrong[:, :, at, 9] = float("nan")
            got = torch.autograd.grad(out, leaves, wrong, retain_graph=True)
            other, unseen = torch.arange(131) != at, ~case.visible[0, 0, at]
            for x, y, rows in zip(got, clean, (other, unseen, unseen), strict=True):
                assert torch.equal(x[:, :, rows], y[:, :, rows]), (pattern, at)
                assert x[:, :, ~rows].isnan().any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_0_where_nothing_is_seen(use: Use, level: str, dtype: torch.dtype) -> None:
    use(level)
    for pattern, kind in ((Window.last(20), "chunk"), (Causal(), "before"), (Causal(), "right")):
        case = problem(pattern, kind, 131, (6, 2), (16, 16), dtype)
        *_, dq, dk, dv = outcome(case)
        assert (dq[~case.visible.any(-1)] == 0).all()
        unseen = ~case.visible.unflatten(1, (2, 3)).any(2).any(2)
        assert unseen.any() or kind == "before"
        assert (dk[unseen] == 0).all()
        assert (dv[unseen] == 0).all()


LAID_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "[B, T, H, D]": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "[H, B, T, D]": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "[B, H, D, T]": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "part of wider rows": lambda t: torch.cat((t, t, t), -1)[..., t.shape[-1] : 2 * t.shape[-1]],
    "every second slot": lambda t: t.repeat_interleave(2, 2)[:, :, ::2],
    "one element off": lambda t: torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_tensors_lie_changes_nothing(use: Use, level: str, dtype: torch.dtype) -> None:
    use(level)
    for dims in ((64, 64), (33, 9)):
        case = problem(Window.last(40), "range", 131, (6, 2), dims, dtype)
        expected = outcome(case)
        for change in LAID_OUT.values():
            equal(outcome(replace(case, q=change(case.q), k=change(case.k), v=change(case.v))), expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_head_or_row_repeated_by_strides(use: Use, level: str, dtype: torch.dtype) -> None:
    use(level)
    case = problem(Causal(), "range", 97, (4, 4), (32, 32), dtype)
    k, v = (t[:1, :1].expand(2, 4, -1, -1) for t in (case.k, case.v))
    copied = outcome(replace(case, k=k.contiguous(), v=v.contiguous()))
    equal(outcome(replace(case, k=k, v=v)), copied)


BIG = {
    "causal": lambda: problem(Causal(), "range", 2100, (2, 1), (64, 64), torch.float32),
    "windows": lambda: problem(
        Window.around(70, step=2) | Global(), "global", 1500, (2, 2), (32, 32), DTYPES[1]
    ),
    "scores": lambda: problem(Window.last(64), "packed", 1200, (2, 1), (16, 16), DTYPES[1], "table", 0.2),
    "decode": lambda: Problem.random(Full(), Tokens.range(2, 2998), Tokens.range(3000), heads=(4, 1)),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", BIG)
def test_bits_do_not_depend_on_threads_or_on_the_run(use: Use, level: str, name: str) -> None:
    use(level)
    case = BIG[name]()
    once = outcome(case)
    equal(outcome(case), once)
    for threads in (2, 3):
        equal(outcome(case, threads), once)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_rows_in_many_parts_equal_the_formula(use: Use, level: str, dtype: torch.dtype) -> None:
    """Keys split over the threads, several chunks of tiles, blocks packed again."""
    use(level)
    for queries, keys, heads, pattern in (
        (1, 3001, (8, 2), Full()),
        (5, 2500, (4, 1), Causal()),
        (1100, 1100, (2, 1), Window.last(65)),
        (1, 700, (4, 4), Window.last(600)),
    ):
        q = Tokens.range(queries, start=keys - queries)
        check(Problem.random(pattern, q, Tokens.range(keys), dtype, 1, heads, (64, 64)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("pattern", [Window.last(65), Window.around(40, step=3), Causal()], ids=str)
def test_long_rows_of_one_head_are_split_and_added_up(use: Use, level: str, pattern: Pattern) -> None:
    """Parts of the queries of one kv head, each with gradients of the keys that it reaches."""
    use(level)
    at = Tokens.from_lengths([2000, 700], 2000, "left") if pattern == Causal() else Tokens.range(2000)
    check(Problem.random(pattern, at, at, rows=at.rows, heads=(1, 1), dims=(16, 16)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_of_any_size_keep_the_softmax(use: Use, level: str, dtype: torch.dtype) -> None:
    """Rising and falling by 128 a key: the running maximum is renewed, all other weights underflow to 0."""
    use(level)
    at = torch.arange(300)
    k = torch.zeros(300, 16, dtype=dtype)
    k[:, 0], k[:, 9] = at // 16 * 2048, at % 16 * 128
    for sign in (1.0, -1.0):
        case = problem(Causal(), "range", 300, (2, 1), (16, 16), dtype, scale=sign)
        case = replace(case, k=k.expand(2, 1, -1, -1), q=torch.ones_like(case.q))
        got = case.run()
        last = at if sign > 0 else torch.zeros_like(at)
        torch.testing.assert_close(got.out, case.v[:, :, last].expand_as(got.out))
        torch.testing.assert_close(got.lse, (sign * case.k.float().sum(-1))[:, :, last].expand_as(got.lse))


@pytest.mark.parametrize("level", LEVELS)
def test_rounded_weights_sum_to_1(use: Use, level: str) -> None:
    """Weights in bfloat16 are divided by the sum of what was rounded: values that are all 1 stay 1, to the bit."""
    use(level)
    for pattern in (Window.last(2), Window.last(3), Window.around(7), Causal()):
        case = problem(pattern, "range", 300, (6, 2), (16, 16), torch.bfloat16)
        case = replace(case, v=torch.ones_like(case.v))
        assert (case.run().out == 1).all(), pattern


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_to_compute_is_computed(use: Use, level: str) -> None:
    use(level)
    for queries, keys, rows in ((0, 5, 2), (5, 0, 2), (0, 0, 2), (3, 3, 0)):
        case = Problem.random(Causal(), Tokens.range(queries), Tokens.range(keys), rows=rows)
        out, lse, dq, dk, dv = outcome(case)
        assert (out == 0).all()
        assert (lse == -float("inf")).all() or rows == 0
        assert all((t == 0).all() for t in (dq, dk, dv))
