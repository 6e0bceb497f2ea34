"""A sink logit is one more column of scores with a value of 0, in every backend."""

from collections.abc import Callable
from operator import attrgetter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.attention import BACKENDS, Backend, KeyValues, attend, attend_keys, attention_weights
from headway.attention.call import validate
from headway.errors import PatternError
from headway.parallel import ContextParallel, Exchange, ShardLayout
from headway.partial import Partial
from headway.patterns import Causal, Chunk, Full, GlobalKeys, Pattern, PerHead, Sink, Window, visible
from headway.scores import SoftCap
from headway.tokens import Tokens
from tests import strategies
from tests.naive import with_gradients
from tests.native.presence import needs_kernels
from tests.parallel.simulation import simulate
from tests.tolerance import assert_within_reference

SUM = {"rtol": 1e-11, "atol": 1e-12}


def formula(pattern: Pattern, at: Tokens) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a function to (out, lse): softmax over the scores and one more column, whose value is 0."""

    def run(q: Tensor, k: Tensor, v: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~visible(pattern, at, at), float("-inf"))
        column = logit.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
        return torch.softmax(scores, -1)[..., :-1] @ v, torch.logsumexp(scores, -1)

    return run


def drawn(n: int, rows: int = 2, heads: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Returns q, k, v, the logits, and the weights of out and lse in a loss."""
    random = torch.Generator().manual_seed(n)
    shapes = [
        (rows, heads, n, 6),
        (rows, 2, n, 6),
        (rows, 2, n, 5),
        (heads,),
        (rows, heads, n, 5),
        (rows, heads, n),
    ]
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]


def differentiated(run: Callable[..., tuple[Tensor, Tensor]], *drawn: Tensor) -> list[Tensor]:
    """Returns out, lse, and the gradients for q, k, v and the logits of a loss that is linear in out and lse."""
    *inputs, d_out, d_lse = drawn
    leaves = [t.detach().requires_grad_() for t in inputs]
    out, lse = run(*leaves)
    loss = (out * d_out).sum() + (lse * d_lse).masked_fill(lse == float("-inf"), 0.0).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def by(backend: str, pattern: Pattern, at: Tokens) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
        part = attend_keys(q, at, [KeyValues(k, v, at)], pattern, sink_logit=logit, backend=backend)
        return part.out, part.lse

    return run


@given(strategies.patterns, strategies.tokens(st.integers(1, 24)), st.sampled_from(["dense", "banded"]))
def test_it_is_one_more_column_of_value_0(pattern: Pattern, at: Tokens, backend: str) -> None:
    inputs = drawn(at.count, at.rows if at.rows > 1 else 2)
    actual, expected = (
        differentiated(run, *inputs) for run in (by(backend, pattern, at), formula(pattern, at))
    )
    valid = at.valid.expand(inputs[0].shape[0], -1)[:, None].expand(-1, 4, -1)
    for a, b in zip(actual, expected, strict=True):
        if a.shape[:3] == valid.shape:  # the result at an empty slot is undefined in both
            a, b = a[valid], b[valid]
        torch.testing.assert_close(a, b, **SUM)


@pytest.mark.parametrize(
    "backend", [b for b in BACKENDS.values() if b.name not in ("flex", "triton")], ids=attrgetter("name")
)
@given(pattern=strategies.patterns)
def test_whichever_backend_says_that_it_can(backend: Backend, pattern: Pattern) -> None:
    """With gradients if the backend has them; in float32 the error is within twice that of the formula in float32.
    ("flex" compiles each pattern: one is below. "triton" has tests of its own.)"""
    at, wide = Tokens.range(13), drawn(13)
    for dtype in (torch.float64, torch.float32):
        inputs = [t.to(dtype) for t in wide]
        q, k, v = (t.requires_grad_() for t in inputs[:3])
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                call = validate(q, at, [KeyValues(k, v, at)], pattern, None, (), None, 0.0, None)
                if backend.unsupported_reason(call, True, "cpu"):
                    continue
                ours, plain = by(backend.name, pattern, at), formula(pattern, at)
                run = differentiated if grad else lambda of, *inputs: of(*inputs[:4])
                actual, exact, low = run(ours, *inputs), run(plain, *wide), run(plain, *inputs)
            for a, truth, reference in zip(actual, exact, low, strict=True):
                if dtype == torch.float64:
                    torch.testing.assert_close(a, truth, **SUM)
                else:
                    assert_within_reference(a, truth, reference, backend.name, terms=8**0.5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_flex_has_it_too() -> None:
    at, inputs = Tokens.range(13), drawn(13)[:4]
    pattern = Chunk(5) & Causal() | Sink(2) & Causal()
    with torch.no_grad():
        actual = by("flex", pattern, at)(*inputs)
    for a, b in zip(actual, formula(pattern, at)(*inputs), strict=True):
        torch.testing.assert_close(a, b, **SUM)


@pytest.mark.parametrize("backend", ["dense", "banded", pytest.param("native", marks=needs_kernels), "auto"])
def test_queries_and_keys_learn_where_only_the_logsumexp_tells_them(backend: str) -> None:
    """All values are 1: out = sigmoid(lse - s), so that q and k have gradients through lse alone. A backward that takes
    lse for a constant gives 0 there (torchtitan#4796)."""
    at = Tokens.range(9)
    q, k, _, logit = (t.float() for t in drawn(9)[:4])
    v, grad = torch.ones(2, 2, 9, 5), torch.ones(2, 4, 9, 5)
    expected = with_gradients(
        lambda *t: formula(Causal(), at)(*t)[0], grad.double(), *(t.double() for t in (q, k, v, logit))
    )
    actual = with_gradients(
        lambda q, k, v, s: attend(q, k, v, Causal(), sink_logit=s, backend=backend), grad, q, k, v, logit
    )
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    _, dq, dk, *_ = actual
    assert dq.abs().amax() > 0.1
    assert dk.abs().amax() > 0.1


@given(st.integers(1, 5), st.integers(0, 5))
def test_it_is_a_merge_with_a_partial_of_value_0(rows: int, empty: int) -> None:
    out, lse, logit = (
        torch.randn(rows, 3, dtype=torch.float64),
        torch.randn(rows).double(),
        torch.randn(rows).double(),
    )
    out[:empty], lse[:empty] = 0.0, float("-inf")
    with_sink, merged = (
        Partial(out, lse).with_sink(logit),
        Partial(out, lse).merge(Partial(torch.zeros_like(out), logit)),
    )
    torch.testing.assert_close(with_sink.out, merged.out)
    torch.testing.assert_close(with_sink.lse, merged.lse)


def test_no_sink_and_no_key_are_nothing_and_pass_no_gradient() -> None:
    """A logit of -inf means no sink, even if a query sees no key."""
    at = Tokens.from_lengths([5, 3], 5)
    q, k, v, *_ = drawn(5)
    no_sink = torch.full((4,), float("-inf"), dtype=torch.float64)
    torch.testing.assert_close(
        attend(q, k, v, q_tokens=at, k_tokens=at, sink_logit=no_sink),
        attend(q, k, v, q_tokens=at, k_tokens=at),
    )
    logit = no_sink.requires_grad_()
    attend(q, k, v, q_tokens=at, k_tokens=at, sink_logit=logit).sum().backward()
    assert logit.grad is not None
    assert (logit.grad == 0).all()


def test_sets_of_keys_heads_of_their_own_scores_and_dropout_go_with_it() -> None:
    at = Tokens.range(12)
    q, k, v, logit, *_ = drawn(12)
    heads = PerHead(Causal(), Window.last(3), Causal(), Window.last(3) | Sink(1) & Causal())
    expected, lse = formula(heads, at)(q, k, v, logit)
    parts = [KeyValues(k[:, :, a:b], v[:, :, a:b], at.slice(a, b)) for a, b in ((0, 5), (5, 12))]
    part = attend_keys(q, at, parts, heads, sink_logit=logit)
    torch.testing.assert_close(part.out, expected, **SUM)
    torch.testing.assert_close(part.lse, lse, **SUM)
    options = {"score": SoftCap(2.0), "dropout": 0.4, "seed": 3}
    bare = attend_keys(q, at, [KeyValues(k, v, at)], Causal(), **options)
    mixed = attend(q, k, v, Causal(), **options, sink_logit=logit)
    torch.testing.assert_close(
        mixed, bare.merge(Partial(torch.zeros_like(bare.out), logit.view(1, 4, 1).expand(2, 4, 12))).out
    )


def test_keys_of_8_bits_and_calls_that_are_repeated() -> None:
    """The second call of the same shape comes from the cache of calls, but uses its own logits."""
    at = Tokens.range(64)
    q, k, v, logit, *_ = (t.float() for t in drawn(64))
    keys = KeyValues(k, v, at).quantized()
    plain = keys.dequantized(torch.float32)
    with torch.no_grad():
        for s in (logit, logit + 1):
            expected, _ = formula(Causal(), at)(q, plain.k, plain.v, s)
            actual = attend_keys(q, at, [keys], Causal(), sink_logit=s, lse=False).out
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_weights_are_those_of_the_keys_alone() -> None:
    q, k, v, logit, *_ = drawn(7)
    weights = attention_weights(q, k, Causal(), sink_logit=logit)
    assert (weights.sum(-1) < 1).all()
    torch.testing.assert_close(
        weights @ v.repeat_interleave(2, 1), attend(q, k, v, Causal(), sink_logit=logit), **SUM
    )


@pytest.mark.parametrize("pattern", [Causal(), Full(), Window.last(4) | Causal() & GlobalKeys()], ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
def test_under_context_parallel_it_is_merged_once(ranks: int, pattern: Pattern) -> None:
    tokens, inputs = Tokens.range(12).with_global([[1]]), drawn(12)
    layout = ShardLayout.contiguous(12, ranks)
    expected = differentiated(formula(pattern, tokens), *inputs)

    def rank(exchange: Exchange) -> list[Tensor]:
        context = ContextParallel(tokens, layout, exchange)
        q, k, v, d_out, d_lse = (context.take(t, 2) for t in (*inputs[:3], *inputs[4:]))

        def run(q: Tensor, k: Tensor, v: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
            part = context.attend(q, k, v, pattern, sink_logit=logit)
            return part.out, part.lse

        return differentiated(run, q, k, v, inputs[3], d_out, d_lse)

    results = list(zip(*simulate(ranks, rank), strict=True))
    shards = [layout.join(list(same), 2) for same in results[:5]]
    for a, b in zip([*shards, torch.stack(results[5]).sum(0)], expected, strict=True):
        torch.testing.assert_close(a, b, **SUM)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3), torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64), 0.5], ids=str
)
def test_it_is_a_number_for_each_query_head(wrong: object) -> None:
    q = torch.randn(1, 4, 5, 8)
    with pytest.raises(
        PatternError, match=r"sink_logit must be floating point \[4\] \(one per query head\) on cpu, got"
    ):
        attend(q, q, q, Causal(), sink_logit=wrong)  # type: ignore[arg-type]
    with pytest.raises(PatternError, match="attention_weights: sink_logit must be floating point"):
        attention_weights(q, q, Causal(), sink_logit=wrong)  # type: ignore[arg-type]
