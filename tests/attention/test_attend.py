"""Laws of `attend`: unseen keys, causality, dropout, scores, masks, heads, and the choice of a backend."""

import itertools
from functools import partial

import pytest
import torch
from torch import Tensor

from headway.attention import KeyValues, attend, attend_keys, attention_weights, choose
from headway.attention.dropout import keep_scale
from headway.errors import BackendError, PatternError
from headway.patterns import Causal, Full, Global, Pattern, PerHead, Sink, Window, visible
from headway.scores import ALiBi, Bias, RelativeKey, SoftCap, alibi_slopes
from headway.tokens import Tokens
from tests.attention.small import scores
from tests.naive import naive, with_gradients
from tests.native.presence import pretend

BACKENDS = ["dense", "sdpa", "banded", "diagonal"]


def qkv(
    n: int = 11, heads: int = 4, kv: int = 2, width: int = 6, value: int | None = None
) -> tuple[Tensor, ...]:
    shapes = ((2, heads, n, width), (2, kv, n, width), (2, kv, n, value or width))
    return tuple(torch.randn(s, dtype=torch.float64) for s in shapes)


@pytest.mark.parametrize("backend", ["dense", "banded", "diagonal"])
@pytest.mark.parametrize("pattern", [Full(), Causal(), Window.around(3) | Global()], ids=str)
def test_values_of_another_width(backend: str, pattern: Pattern) -> None:
    q, k, v = qkv(value=9)
    at = Tokens.range(11).with_global([2])
    grad = torch.randn(2, 4, 11, 9, dtype=torch.float64)
    ours = with_gradients(
        lambda *t: attend(*t, pattern, q_tokens=at, k_tokens=at, backend=backend), grad, q, k, v
    )
    plain = with_gradients(lambda *t: naive(*t, pattern, at, at), grad, q, k, v)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", [Full(), Causal(), Window.last(3), Window.around(2) | Sink(2)], ids=str)
def test_what_no_query_sees_does_not_matter(backend: str, pattern: Pattern) -> None:
    """Padding on the left, and keys before every window, hold NaN or infinity in their keys, values or both:
    clean results, and a gradient of exactly zero."""
    n = 11
    q, k, v = qkv(n)
    at = Tokens.from_lengths([n, 7], n, "left")
    q_tokens = at
    if pattern == Window.last(3) and backend != "diagonal":
        q_tokens = Tokens(at.index[:, 8:])
        q = q[:, :, 8:]
    seen = (naive_mask(pattern, q_tokens, at)).any(-2)[:, 0]
    bad = (~seen)[:, None, :, None]
    assert bad.any()
    grad = torch.randn(2, 4, q.shape[2], 6, dtype=torch.float64)
    plain = with_gradients(lambda *t: naive(*t, pattern, q_tokens, at), grad, q, k, v)
    for poison, places in itertools.product((float("nan"), float("inf"), -float("inf")), ("k", "v", "kv")):
        ours = with_gradients(
            lambda *t: attend(*t, pattern, q_tokens=q_tokens, k_tokens=at, backend=backend),
            grad,
            q,
            *(t.masked_fill(bad, poison) if name in places else t for name, t in (("k", k), ("v", v))),
        )
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        for gradient in ours[2:]:
            assert (gradient.masked_select(bad) == 0).all()


def naive_mask(pattern: Pattern, q: Tokens, k: Tokens) -> Tensor:
    return visible(pattern, q, k).expand(2, -1, -1, -1)


def test_the_future_does_not_leak() -> None:
    """Perturbing token t leaves every output before t bitwise unchanged (requirement 14)."""
    q, k, v = (t.float() for t in qkv(40, 4, 2, 8))
    for backend, t in itertools.product(["dense", "sdpa", "banded", "diagonal"], [1, 17, 39]):
        before = attend(q, k, v, Causal(), backend=backend)
        k2, v2 = k.clone(), v.clone()
        k2[:, :, t] += 1.0
        v2[:, :, t] -= 1.0
        after = attend(q, k2, v2, Causal(), backend=backend)
        assert torch.equal(before[:, :, :t], after[:, :, :t])
        assert not torch.equal(before[:, :, t], after[:, :, t])


@pytest.mark.parametrize("backend", ["dense", "banded"])
def test_dropout_is_a_function_of_the_place(backend: str) -> None:
    """Every backend and every split of the keys drops the same weights; lse is computed before dropout."""
    q, k, v = qkv(70, 4, 2)
    at = Tokens.range(70)
    grad = torch.randn(2, 4, 70, 6, dtype=torch.float64)
    whole = with_gradients(
        lambda *t: attend(*t, Causal(), dropout=0.3, seed=7, backend="dense"), grad, q, k, v
    )

    def split(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sets = [KeyValues(k[:, :, a:b], v[:, :, a:b], at.slice(a, b)) for a, b in ((0, 9), (9, 50), (50, 70))]
        return attend_keys(q, at, sets, Causal(), dropout=0.3, seed=7, backend=backend).out

    for a, b in zip(whole, with_gradients(split, grad, q, k, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    lse = [
        attend_keys(q, at, [KeyValues(k, v, at)], Causal(), dropout=p, backend=backend).lse
        for p in (0.0, 0.5)
    ]
    torch.testing.assert_close(*lse)


def test_dropout_drops_at_its_rate_and_keeps_the_mean() -> None:
    q = torch.zeros(4, 8, 64, 4)
    v = torch.eye(64).expand(4, 8, 64, 64)
    weights = attend(q, torch.zeros(4, 8, 64, 4), v, dropout=0.25, backend="dense") * 64
    rate = (weights == 0).double().mean().item()
    assert abs(rate - 0.25) < 5 * (0.25 * 0.75 / weights.numel()) ** 0.5
    torch.testing.assert_close(weights[weights != 0], torch.full_like(weights[weights != 0], 1 / 0.75))
    torch.manual_seed(3)
    first = attend(q, q, v, dropout=0.25)
    assert not torch.equal(first, attend(q, q, v, dropout=0.25))
    torch.manual_seed(3)
    assert torch.equal(first, attend(q, q, v, dropout=0.25))


def test_the_keep_bit_depends_on_the_whole_seed_and_on_every_coordinate() -> None:
    at = torch.arange(6)
    masks = [
        keep_scale(seed, 0.5, at, at, at[None], at[None], torch.float64)
        for seed in (0, 1, 2, 1 << 32, 2 << 32)
    ]
    slices = [*masks, *(masks[0].unbind(0)), *masks[0].unbind(1), *masks[0].unbind(2), *masks[0].unbind(3)]
    same = [(i, j) for i, a in enumerate(slices) for j in range(i) if torch.equal(a, slices[j])]
    assert not same


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("pattern", [Full(), Window.last(9), Window.around(4) | Sink(1)], ids=str)
def test_scores_in_blocks_equal_dense_with_gradients_of_their_tables(number: int, pattern: Pattern) -> None:
    q, k, v = qkv(140)
    step = scores(4, 6)[number]
    grad = torch.randn(2, 4, 140, 6, dtype=torch.float64)

    def run(backend: str) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = attend(*leaves, pattern, score=[step, SoftCap(5.0)], backend=backend)
        return [out.detach(), *torch.autograd.grad(out, [*leaves, *step.parameters], grad)]

    for a, b in zip(run("dense"), run("banded"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_slopes_are_powers_of_two() -> None:
    assert alibi_slopes(8) == tuple(2.0 ** -(h + 1) for h in range(8))
    assert len(alibi_slopes(12)) == 12


def attention_scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(2, 1).transpose(-1, -2) * q.shape[-1] ** -0.5


def test_a_bias_tied_to_slots_runs_dense_and_nowhere_else() -> None:
    q, k, v = qkv(9)
    bias = torch.randn(1, 4, 9, 9, dtype=torch.float64)
    actual = attend(q, k, v, score=Bias(bias), scale=0.7)
    expected = torch.softmax(attention_scores(q, k) * 6**0.5 * 0.7 + bias, -1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(actual, expected)
    with pytest.raises(
        BackendError, match=r"banded.*does not support a bias tensor per slot.*would take dense"
    ):
        attend(q, k, v, score=Bias(bias), backend="banded")
    with pytest.raises(PatternError, match=r"Bias: a tensor of shape \(3, 3\) does not broadcast"):
        attend(q, k, v, score=Bias(torch.zeros(3, 3)))


def test_keep_is_an_escape_hatch_for_dense_and_sdpa() -> None:
    q, k, v = qkv(9)
    keep = torch.rand(2, 1, 9, 9) < 0.5
    keep[0, 0, 3] = False
    runs = [attend(q, k, v, Causal(), keep=keep, backend=b) for b in ("dense", "sdpa", "auto")]
    for out in runs[1:]:
        torch.testing.assert_close(out, runs[0], rtol=1e-12, atol=1e-12)
    assert (runs[0][0, :, 3] == 0).all()
    with pytest.raises(BackendError, match="does not support a keep mask"):
        attend(q, k, v, Causal(), keep=keep, backend="banded")


def test_heads_with_patterns_of_their_own_equal_the_heads_alone() -> None:
    q, k, v = qkv(33, heads=6, kv=2)
    parts = [Window.last(4), Causal(), Causal(), Window.last(4), Window.around(2), Causal()]
    grad = torch.randn(2, 6, 33, 6, dtype=torch.float64)
    ours = with_gradients(lambda *t: attend(*t, PerHead(*parts)), grad, q, k, v)
    at = Tokens.range(33)
    plain = with_gradients(lambda *t: naive(*t, PerHead(*parts), at, at), grad, q, k, v)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    slopes = alibi_slopes(6)
    biased = attend(q, k, v, PerHead(*parts), score=ALiBi(slopes), backend="banded")
    for h, p in enumerate(parts):
        alone = attend(
            q[:, h : h + 1],
            k[:, h // 3 : h // 3 + 1],
            v[:, h // 3 : h // 3 + 1],
            p,
            score=ALiBi((slopes[h],)),
        )
        torch.testing.assert_close(biased[:, h : h + 1], alone)


def test_weights_are_a_distribution_over_what_is_seen() -> None:
    """Weights are at least 0 and sum to 1 in each row; a masked weight is exactly 0 (requirement 1)."""
    q, k, v = qkv(13)
    at = Tokens.from_lengths([13, 6], 13)
    w = attention_weights(q, k, Window.last(4), q_tokens=at, k_tokens=at)
    mask = naive_mask(Window.last(4), at, at)
    assert (w >= 0).all()
    assert (w.masked_select(~mask) == 0).all()
    torch.testing.assert_close(w.sum(-1), mask.any(-1).double().expand(2, 4, 13))
    out = attend(q, k, v, Window.last(4), q_tokens=at, k_tokens=at)
    torch.testing.assert_close(w @ v.repeat_interleave(2, 1), out)


def test_equal_inputs_give_bit_equal_results() -> None:
    q, k, v = (t.float() for t in qkv(300))
    for backend in ("dense", "sdpa", "banded"):
        run = partial(attend, pattern=Window.last(40), backend=backend)
        a, b = (with_gradients(run, q, q, k, v) for _ in "ab")
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def what(pattern: Pattern, queries: int, keys: int, **options) -> str:  # type: ignore[no-untyped-def]
    return choose(pattern, queries=queries, keys=keys, heads=8, kv_heads=2, **options).what


def test_choices_with_the_native_kernels_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, there=True)
    for options in (
        {},
        {"dtype": torch.bfloat16},
        {"gradient": True},
        {"dropout": 0.1},
        {"score": (SoftCap(5.0),)},
    ):
        assert what(Causal(), 4096, 4096, **options) == "native"
        assert what(Window.last(512), 8192, 8192, **options) == "native"
    assert what(Causal(), 1, 4096) == "native"
    assert what(Causal(), 4096, 4096, paged=True) == "native"
    assert what(Causal(), 8, 8) == what(Window.last(3), 8, 8) == "sdpa"
    assert what(Causal(), 8, 8, dropout=0.1) == what(Window.last(8), 8, 8, score=(ALiBi(),)) == "native"
    assert what(Causal(), 4096, 4096, dtype=torch.float64) == "sdpa"
    assert what(Causal(), 4096, 4096, score=(RelativeKey(torch.ones(3, 64)),)) == "banded"
    small = choose(Causal(), queries=8, keys=8, heads=8)
    assert small.rejected == (("native", "torch's kernel is faster for 32768 products"),)
    assert "skipped" in choose(Window.last(512), queries=8192, keys=8192, heads=8).why


def test_choices_without_the_native_kernels_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, there=False)
    assert what(Causal(), 4096, 4096) == "sdpa"
    assert what(Window.last(8192), 4096, 4096) == "sdpa"
    assert what(Window.last(512), 8192, 8192) == "banded"
    assert what(Window.last(512), 64, 64) == "sdpa"
    assert what(Causal(), 1, 4096) == "sdpa"
    assert what(Causal(), 4096, 4096, dropout=0.1) == "banded"
    assert what(Window.last(8), 64, 64) == "sdpa"
    assert what(Window.last(8), 64, 64, dropout=0.1) == "dense"
    assert what(Window.last(64), 512, 512) == "banded"
    window = choose(Window.last(512), queries=8192, keys=8192, heads=8)
    assert window.rejected[:2] == (
        ("native", "none were built"),
        ("sdpa", "it would build a mask of queries x keys"),
    )
    assert "skipped" in window.why
    assert window.rejected[2][0] == "dense"
