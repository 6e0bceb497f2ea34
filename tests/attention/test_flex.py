"""The flex backend: the block mask made from a pattern, its predicate and its scores.

With a GPU the compiled kernels run, in float32; without, torch's unfused form runs in float64, traced by the
same compiler front end (only `test_kernels_in_blocks_read_the_lists` runs blocked code there).
"""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.attention import KeyValues, attend, attend_keys
from headway.attention.backends.flex import backend as flex
from headway.attention.call import validate
from headway.errors import PatternError
from headway.partial import Partial
from headway.patterns import Causal, Full, Global, GlobalKeys, Pattern, PerHead, Sink, Window, visible
from headway.scores import ALiBi, RelativeBias, RelativeKey, Score, SoftCap
from headway.tokens import Tokens
from tests.attention.small import scores
from tests.strategies import patterns, tokens
from tests.tolerance import assert_within_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float32 if DEVICE == "cuda" else torch.float64

pytestmark = [  # torch's own warnings while it compiles
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]


def qkv(q: Tokens, k: Tokens, heads: int = 4, kv: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, heads, q.count, 16), (2, kv, k.count, 16), (2, kv, k.count, 24))
    queries, keys, values = (torch.randn(s, dtype=DTYPE, device=DEVICE) for s in shapes)
    return queries, keys, values


def named(value: Pattern | Tokens) -> str:
    return str(value) if isinstance(value, Pattern) else f"{value.count} slots"


def on_device(t: Tokens) -> Tokens:
    return t.to(DEVICE)


def assert_same(actual: Partial, q: Tensor, k: Tensor, v: Tensor, *rest, score=()) -> None:  # type: ignore[no-untyped-def]
    """Checks against dense in float64, to 1e-11 or, on CUDA, to twice dense's own error; `rest`: tokens, pattern."""
    q_tokens, k_tokens, pattern = rest
    wide = [t.double() for t in (q, k, v)]
    exact = attend_keys(
        wide[0], q_tokens, [KeyValues(*wide[1:], k_tokens)], pattern, score=score, backend="dense"
    )
    assert torch.equal(actual.lse == -torch.inf, exact.lse == -torch.inf)
    seen = exact.lse > -torch.inf
    if DEVICE == "cpu":
        torch.testing.assert_close(actual.out, exact.out, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(actual.lse[seen], exact.lse[seen], rtol=1e-11, atol=1e-11)
        return
    low = attend_keys(q, q_tokens, [KeyValues(k, v, k_tokens)], pattern, score=score, backend="dense")
    assert_within_reference(actual.out, exact.out, low.out)
    assert_within_reference(actual.lse[seen], exact.lse[seen], low.lse[seen])


# -- the block mask ------------------------------------------------------------------------------------------


def expanded(counts: Tensor, indices: Tensor) -> Tensor:
    """Returns lists of tiles as bool [B, rows, columns]; checks that each list rises without repeats."""
    assert counts.shape[1] == indices.shape[1] == 1
    tiles = torch.zeros(indices.shape[0], *indices.shape[2:], dtype=torch.bool)
    for b in range(indices.shape[0]):
        for i in range(indices.shape[2]):
            row = indices[b, 0, i, : counts[b, 0, i]].tolist()
            assert row == sorted(set(row))
            tiles[b, i, row] = True
    return tiles


def pairs(tiles: Tensor, block: int, q: int, k: int) -> Tensor:
    """Expands tiles [B, rows, columns] to pairs [B, T, S]."""
    return tiles.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :q, :k]


@given(st.data(), patterns, st.sampled_from([4, 8]))
def test_tiles_and_predicate_say_exactly_what_is_visible(
    data: st.DataObject, pattern: Pattern, block: int
) -> None:
    q, k = data.draw(tokens()), data.draw(tokens())
    with mock.patch.object(flex, "BLOCK", block):
        mask = flex.block_mask(pattern, q, k)
    partial = expanded(mask.kv_num_blocks, mask.kv_indices)
    full = expanded(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (partial & full).any()
    rows = max(q.rows, k.rows)
    b, h, m, n = (
        torch.arange(size).view([-1 if i == axis else 1 for i in range(4)])
        for axis, size in enumerate((rows, 1, q.count, k.count))
    )
    seen = visible(pattern, q, k)[:, 0].expand(rows, -1, -1)
    allowed = mask.mask_mod(b, h, m, n)[:, 0].expand(rows, q.count, k.count)
    assert torch.equal(allowed, seen)
    size = (block, q.count, k.count)
    assert torch.equal((pairs(partial, *size) & allowed) | pairs(full, *size), seen)
    short = torch.zeros_like(full)
    short[:, -1] |= q.count % block > 0
    short[:, :, -1] |= k.count % block > 0
    assert not (full & short).any(), "a tile that reaches past the end must be masked"
    assert torch.equal(expanded(mask.q_num_blocks, mask.q_indices), partial.mT)
    assert torch.equal(expanded(mask.full_q_num_blocks, mask.full_q_indices), full.mT)


@pytest.mark.parametrize(
    "pattern",
    [Full(), Causal(), Window.last(200), Window.around(300), Window(5, 260), Window.around(9) | Sink(130)],
    ids=str,
)
def test_tiles_of_plain_rows_are_those_that_torch_finds_by_looking_at_all_pairs(pattern: Pattern) -> None:
    for start, queries, keys in ((0, 700, 700), (0, 512, 512), (300, 213, 640)):
        q, k = Tokens.range(queries, start), Tokens.range(keys)
        ours = flex.block_mask(pattern, q, k)
        seen = visible(pattern, q, k)[0, 0]
        theirs = torch_flex.create_block_mask(
            lambda b, h, m, n, seen=seen: seen[m, n], None, None, queries, keys, device="cpu"
        )
        for a, b in (
            ((ours.kv_num_blocks, ours.kv_indices), (theirs.kv_num_blocks, theirs.kv_indices)),
            (
                (ours.full_kv_num_blocks, ours.full_kv_indices),
                (theirs.full_kv_num_blocks, theirs.full_kv_indices),
            ),
        ):
            assert torch.equal(expanded(*a), expanded(*b))


# -- the same as dense ---------------------------------------------------------------------------------------

RANGE, LONG = Tokens.range(150), Tokens.range(300)
LEFT = Tokens.from_lengths([300, 170], 300, "left")
PACKED = Tokens.packed([[100, 90], [50, 200, 10]], 300)
MARKED = Tokens.from_lengths([280, 150], 300).with_global([[0, 3], [149]])
MOVED = PACKED.with_position(torch.arange(300).unsqueeze(0) * 2)

CASES = [
    (Causal(), LONG, LONG),
    (Causal(), Tokens.range(100, 200), LONG),
    (Window.last(40), LEFT, LEFT),
    (Window.around(20, step=3) | Global(), MARKED, MARKED),
    ((Window.around(30) & Causal()) | Sink(3), PACKED, PACKED),
    (GlobalKeys(), RANGE, MARKED),
    (Full(), RANGE, LEFT),
]


@pytest.mark.parametrize(
    ("pattern", "q_tokens", "k_tokens"),
    [pytest.param(*case, marks=pytest.mark.slow if i % 2 else ()) for i, case in enumerate(CASES)],
    ids=named,
)
def test_flex_is_dense(pattern: Pattern, q_tokens: Tokens, k_tokens: Tokens) -> None:
    at = on_device(q_tokens), on_device(k_tokens)
    q, k, v = qkv(*at)
    actual = attend_keys(q, at[0], [KeyValues(k, v, at[1])], pattern, backend="flex")
    assert_same(actual, q, k, v, *at, pattern)
    out = attend(q, k, v, pattern, q_tokens=at[0], k_tokens=at[1], backend="flex")
    torch.testing.assert_close(out, actual.out)


@pytest.fixture
def _unfused() -> Iterator[None]:
    """Runs torch's unfused form without its compiler's front end, which is quick enough for many patterns."""
    with (
        mock.patch.object(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        mock.patch.object(flex, "_compiled", return_value=flex._attend),
    ):
        yield


@pytest.mark.usefixtures("_unfused")
@given(st.data(), patterns, st.sampled_from([(), (ALiBi(),), (SoftCap(3.0), ALiBi((0.5, 0.1)))]))
def test_flex_is_dense_for_any_pattern_and_tokens(
    data: st.DataObject, pattern: Pattern, score: tuple[Score, ...]
) -> None:
    at = on_device(data.draw(tokens())), on_device(data.draw(tokens()))
    q, k, v = qkv(*at, heads=2, kv=1)
    actual = attend_keys(q, at[0], [KeyValues(k, v, at[1])], pattern, score=score, backend="flex")
    assert_same(actual, q, k, v, *at, pattern, score=score)


def anywhere(*_: Tensor) -> None:
    """Replaces torch's check that the device supports a backward."""


@pytest.mark.parametrize("number", range(5))
def test_scores_and_all_gradients_are_those_of_dense(number: int) -> None:
    """Gradients for q, k, v and the score's table; on a CPU torch's unfused backward is allowed to run."""
    at, pattern = on_device(MOVED), Window.around(30) | Sink(2)
    steps = [scores(4, 16, DTYPE, DEVICE)[number], SoftCap(5.0)]
    leaves = [t.requires_grad_() for t in qkv(at, at)]
    mix = [torch.randn(2, 4, 300, 24, device=DEVICE), torch.randn(2, 4, 300, device=DEVICE)]

    def gradients(backend: str, dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (t.to(dtype) for t in leaves)
        call = validate(q, at, [KeyValues(k, v, at)], pattern, None, steps, None, 0.0, None)
        with mock.patch.object(torch_flex, "_validate_device", anywhere):
            part = (
                flex.forward(call)
                if backend == "flex"
                else attend_keys(q, at, call.keys, pattern, score=steps, backend="dense")
            )
        lse = part.lse.masked_fill(part.lse == -torch.inf, 0.0)
        total = (part.out * mix[0]).sum() + (lse * mix[1]).sum()
        return [part.out.detach(), *torch.autograd.grad(total, [*leaves, *steps[0].parameters])]

    exact = gradients("dense", torch.float64)
    low = gradients("dense", DTYPE)
    for ours, truth, plain in zip(gradients("flex", DTYPE), exact, low, strict=True):
        assert ours.abs().max() > 0
        assert_within_reference(ours, truth.double(), plain, terms=24**0.5)


@pytest.mark.parametrize("backend", ["dense", "banded", "flex"])
def test_steps_for_other_heads_or_widths_are_refused_everywhere(backend: str) -> None:
    q, k, v = qkv(RANGE, RANGE)
    at = on_device(RANGE)
    for step, text in (
        (ALiBi((1.0, 2.0, 3.0)), "ALiBi is for 3 heads, the call has 4"),
        (
            RelativeBias(torch.ones(32, 8, device=DEVICE)),
            "RelativeBias is for 8 heads, the call has 4",
        ),
        (RelativeKey(torch.ones(4, 16, device=DEVICE)), r"must be \[2 \* clip \+ 1, 16\] .*, got \[4, 16\]"),
        (RelativeKey(torch.ones(5, 8, device=DEVICE)), r"must be \[2 \* clip \+ 1, 16\] .*, got \[5, 8\]"),
    ):
        with pytest.raises(PatternError, match=text):
            attend(q, k, v, Causal(), q_tokens=at, k_tokens=at, score=step, backend=backend)


def test_heads_and_key_sets_are_taken_apart_and_merged() -> None:
    q, k, v = qkv(RANGE, LONG)
    at, past = on_device(Tokens.range(150, 150)), on_device(LONG)
    parts = PerHead(Window.last(9), Causal(), Causal(), Window.last(9))
    sets = [KeyValues(k[:, :, a:b], v[:, :, a:b], past.slice(a, b)) for a, b in ((0, 170), (170, 300))]
    actual = attend_keys(q, at, sets, parts, backend="flex")
    assert_same(actual, q, k, v, at, past, parts)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_no_query_sees_does_not_matter(poison: float) -> None:
    """NaN and inf in padding, and in keys before every window that share a tile with seen keys, change no bit."""
    at, past = on_device(LEFT.slice(200, 300)), on_device(LEFT)
    pattern = Window.last(20)
    q, k, v = qkv(at, past)
    bad = ~visible(pattern, at, past).any(-2)[:, 0, :, None].unsqueeze(1)
    assert bad.any()
    clean = attend_keys(q, at, [KeyValues(k, v, past)], pattern, backend="flex")
    dirty = KeyValues(k.masked_fill(bad, poison), v.masked_fill(bad, poison), past)
    actual = attend_keys(q, at, [dirty], pattern, backend="flex")
    assert torch.equal(actual.out, clean.out)
    assert torch.equal(actual.lse, clean.lse)


def test_empty_calls_give_empty_partials() -> None:
    for queries, keys in ((0, 5), (4, 0)):
        at, past = on_device(Tokens.range(queries)), on_device(Tokens.range(keys))
        q, k, v = qkv(at, past)
        actual = attend_keys(q, at, [KeyValues(k, v, past)], Full(), backend="flex")
        assert actual.out.shape == (2, 4, queries, 24)
        assert (actual.out == 0).all()
        assert (actual.lse == -torch.inf).all()


# The original function, for `test_flex_compiled`, which patches `flex._lists`.
lists = flex._lists
