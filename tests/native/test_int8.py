"""The kernels read int8 keys and values with a scale per slot as the dequantized numbers, at every level."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headway.attention import KeyValues, attend_keys
from headway.partial import Partial
from headway.patterns import Causal, GlobalKeys, Pattern, Sink, Window
from headway.tokens import Tokens
from tests.native.conftest import OF_PAIRS, Use, at_levels
from tests.native.plain import Problem
from tests.tolerance import assert_within_reference

DTYPES = [torch.float32, torch.bfloat16]
HEADS = [(3, 3), (6, 2), (5, 1)]
WIDTHS = [
    (1, 3),
    (8, 8),
    (15, 16),
    (17, 31),
    (33, 32),
    (64, 64),
    (100, 130),
    (128, 128),
    (250, 300),
    (512, 511),
]
PATTERNS: list[Pattern] = [
    Causal(),
    Window.last(60) | Causal() & Sink(3),
    Window.last(33, step=2) | Causal() & GlobalKeys(),
]


def places(kind: str, slots: int) -> tuple[Tokens, Tokens]:
    """Returns tokens of a step, a chunk or a row of queries, and of keys: in order, wrapped, ragged, or pinned."""
    last = Tokens.range(1, start=slots - 1)
    if kind in ("ring", "wrapped"):
        queries = Tokens.range(slots) if kind == "wrapped" else last
        return queries, Tokens(torch.arange(slots).roll(slots // 3)[None])
    if kind == "ragged":
        lengths = torch.tensor([[slots], [max(1, slots // 2)]])
        index = torch.arange(slots)[None].expand(2, -1)
        return Tokens(lengths - 1), Tokens(torch.where(index < lengths, index, -1))
    if kind == "pinned":
        return last, Tokens.range(slots).with_global([0, slots // 2])
    count = {"step": 1, "chunk": min(5, slots), "row": slots}[kind]
    return Tokens.range(count, start=slots - count), Tokens.range(slots)


def stored(case: Problem) -> KeyValues:
    return KeyValues(case.k, case.v, case.k_tokens).quantized()


def standing(case: Problem, keys: KeyValues, dtype: torch.dtype) -> Problem:
    """Returns the same call over the dequantized keys and values."""
    plain = keys.dequantized(dtype)
    return replace(case, q=case.q.to(dtype), k=plain.k, v=plain.v)


def run(case: Problem, keys: KeyValues) -> Partial:
    return attend_keys(case.q, case.q_tokens, [keys], case.pattern, backend="native")


def same(actual: Partial, case: Problem, keys: KeyValues, level: str) -> None:
    """Checks for the bits that dequantized numbers give, if products are of the dtype of q; in 16 bits, the error is at
    most twice that of the formula."""
    dtype = case.q.dtype
    if dtype == torch.float32 or level in OF_PAIRS:
        plain = standing(case, keys, dtype).run()
        assert torch.equal(actual.out, plain.out)
        assert torch.equal(actual.lse, plain.lse)
    if dtype != torch.float32:
        exact, reference = (standing(case, keys, d).formula() for d in (torch.float64, dtype))
        assert_within_reference(actual.out, exact.out, reference.out, "out")


@at_levels(0)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["step", "chunk", "row", "ring", "wrapped", "ragged", "pinned"])
def test_int8_is_what_it_stands_for(use: Use, level: str, dtype: torch.dtype, kind: str) -> None:
    use(level)
    for number, dims in enumerate(WIDTHS):
        q_tokens, k_tokens = places(kind, (1, 63, 64, 130, 201)[number % 5])
        heads, pattern = HEADS[number % 3], PATTERNS[(number // 2) % 3]
        case = Problem.random(pattern, q_tokens, k_tokens, dtype, heads=heads, dims=dims)
        keys = stored(case)
        same(run(case, keys), case, keys, level)


@at_levels(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_int8_and_scales_lie_changes_nothing(use: Use, level: str, dtype: torch.dtype) -> None:
    """Keys and scales may be views of a larger cache, with slots apart, one row or head for all, at any address."""
    use(level)
    case = Problem.random(Causal(), *places("chunk", 70), dtype, heads=(6, 2), dims=(33, 17))
    keys = stored(case)
    expected = run(case, keys)

    def inside(t: Tensor) -> Tensor:
        buffer = torch.full(
            (t.shape[0] + 1, t.shape[1] + 2, 2 * t.shape[2] + 3, *t.shape[3:]), 77, dtype=t.dtype
        )
        view = buffer[1:, 1:-1, 2:-1:2]
        view.copy_(t)
        return view

    def odd(t: Tensor) -> Tensor:
        flat = torch.empty(t.numel() + 1, dtype=t.dtype)
        return flat[1:].view(t.shape).copy_(t)

    for move in (inside, odd, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)):
        actual = run(case, keys.map(move))
        assert torch.equal(actual.out, expected.out)
        assert torch.equal(actual.lse, expected.lse)
    shared = keys.map(lambda t: t[:1, :1].contiguous().expand(2, 2, *t.shape[2:]))
    actual, copied = run(case, shared), run(case, shared.map(Tensor.contiguous))
    assert torch.equal(actual.out, copied.out)


@at_levels(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots_that_nobody_sees_may_hold_any_scale(use: Use, level: str, dtype: torch.dtype) -> None:
    use(level)
    for kind, dims in (("ragged", (33, 17)), ("ring", (64, 64))):
        case = Problem.random(Window.last(20), *places(kind, 131), dtype, heads=(6, 2), dims=dims)
        keys = stored(case)
        unseen = ~case.visible.any(1).any(1)[:, None]
        assert unseen.any()
        for bad in (float("nan"), float("inf")):
            spoilt = replace(
                keys, **{n: getattr(keys, n).masked_fill(unseen, bad) for n in ("k_scale", "v_scale")}
            )
            actual, expected = run(case, spoilt), run(case, keys)
            assert torch.equal(actual.out, expected.out)
            assert torch.equal(actual.lse, expected.lse)


@at_levels(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_fault_in_a_key_is_seen_by_those_who_see_the_key(
    use: Use, level: str, dtype: torch.dtype, bad: float
) -> None:
    """Heads of 33 and 17: the padding of a row's last vector must not become NaN * 0 either."""
    use(level)
    case = Problem.random(Window.last(40), *places("row", 131), dtype, heads=(6, 2), dims=(33, 17))
    clean = run(case, stored(case))
    sees_key = case.visible[..., 50]
    for name in ("k", "v"):
        spoilt = getattr(case, name).clone()
        spoilt[:, :, 50, 5] = bad
        actual = run(case, stored(replace(case, **{name: spoilt})))
        assert torch.equal(actual.out[~sees_key], clean.out[~sees_key])
        assert actual.out[sees_key].isnan().all()
