"""Extensions from outside the package: a pattern is a class, a backend a value to register; both run like ours."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.attention import (
    BACKENDS,
    Backend,
    Capabilities,
    Gradients,
    KeyValues,
    Rule,
    attend,
    attend_keys,
    choose,
    plan,
    register,
    select,
)
from headway.attention.call import Call
from headway.cache import choose_cache
from headway.errors import BackendError
from headway.partial import Partial, merge_all
from headway.patterns import (
    Causal,
    Extent,
    GlobalKeys,
    Pattern,
    PerHead,
    Retention,
    Sink,
    Window,
    draw,
    pairs,
    visible,
)
from headway.patterns.primitives import Kind, Primitive
from headway.positions import NoPositions, Rotary
from headway.scores import ALiBi
from headway.tokens import Tokens
from tests.laws.test_plan import (
    test_a_plan_covers_exactly_what_is_allowed as covers,
)
from tests.laws.test_plan import (
    test_judging_blocks_is_conservative as conservative,
)
from tests.native.presence import needs_kernels
from tests.pairwise import pairwise
from tests.strategies import tokens
from tests.test_orthogonality import (
    DTYPES,
    HEADS,
    LENGTHS,
    POSITIONS,
    TOKENS,
    Case,
    check,
    name,
    through_cache,
)

# -- three patterns, as one writes them in a notebook ----------------------------------------------------------


@dataclass(frozen=True)
class Chunks(Pattern):
    """The tokens up to a query in its own chunk of `size` tokens, written as if there were no primitive for it."""

    size: int
    is_causal = True

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        chunk_q, chunk_k = q.index.unsqueeze(-1) // self.size, k.index.unsqueeze(-2) // self.size
        return (chunk_q == chunk_k) & (k.index.unsqueeze(-2) <= q.index.unsqueeze(-1))

    def judge(self, q: Extent, k: Extent) -> tuple[Tensor, Tensor]:
        q_lo, q_hi, k_lo, k_hi = (t // self.size for t in (q.lo, q.hi, k.lo, k.hi))
        return (k_lo <= q_hi) & (q_lo <= k_hi) & (k.lo <= q.hi), (q_lo == k_hi) & (k_lo == q_hi) & (
            k.hi <= q.lo
        )

    @property
    def reach(self) -> tuple[int, int]:
        return self.size - 1, 0


class Even(Pattern):
    """Every second key; only `allows` is defined."""

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        return (k.index % 2 == 0).unsqueeze(-2).expand(-1, q.count, -1)


@dataclass(frozen=True)
class Recent(Pattern):
    """A window under another name, with the primitive that expresses it."""

    keys: int
    is_causal = True

    @property
    def primitive(self) -> Primitive:
        return Primitive(Kind.WINDOW, 1 - self.keys, 0)

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        distance = q.index.unsqueeze(-1) - k.index.unsqueeze(-2)
        return (distance >= 0) & (distance < self.keys)


OWN: list[Pattern] = [
    Chunks(6),
    Even(),
    Recent(5),
    Chunks(4) | Sink(2) & Causal(),
    Even() & Window.around(9) | GlobalKeys(),
    Recent(7) & Even(),
    PerHead(*[Chunks(5)] * 2, *[Causal()] * 2, Recent(3), Even()),
]


AXES = (OWN, HEADS, POSITIONS, ["auto", "dense", "sdpa", "banded", "diagonal"], TOKENS, DTYPES, LENGTHS)


@pytest.mark.parametrize("case", pairwise(*AXES), ids=name)
def test_an_own_pattern_runs_everywhere_forward_and_backward(case: Case) -> None:
    check(*case)


@needs_kernels
def test_the_kernels_run_what_has_a_primitive() -> None:
    for kind in TOKENS:
        check(Recent(5), HEADS[1], NoPositions(), "native", kind, torch.float32, 131)
        check(Recent(5) | Sink(2), HEADS[1], NoPositions(), "native", kind, torch.bfloat16, 67)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", [p for p in OWN if p.is_causal], ids=str)
def test_an_own_pattern_is_cached_as_its_reach_allows(pattern: Pattern, dtype: torch.dtype) -> None:
    for split in ((1,) * 19, (7, 1, 60, 1, 10)):
        through_cache(pattern, HEADS[1], Rotary(pairing="halves"), dtype, split)


def test_what_is_not_said_has_a_safe_default() -> None:
    assert choose_cache(Chunks(6)).what == "window"
    assert Chunks(6).retention == Retention(5)
    assert not Even().is_causal
    assert Even().reach == (None, None)
    assert str(Chunks(6) & Even()) == "Chunks(6) & Even()"
    assert len({Chunks(6), Chunks(6), Chunks(7)}) == 2


@pytest.mark.parametrize("pattern", OWN[:6], ids=str)
@given(data=st.data())
def test_an_own_pattern_is_drawn_counted_and_planned(pattern: Pattern, data: st.DataObject) -> None:
    q, k = data.draw(tokens()), data.draw(tokens())
    at = Tokens.range(11)
    seen = visible(pattern, at, at)
    assert draw(pattern, 11).count("#") == pairs(pattern, 11, tile=4) == int(seen.sum())
    for law in (conservative, covers):
        law.hypothesis.inner_test(pattern, q, k, 3, 2)  # type: ignore[attr-defined]
    if min(q.rows, k.rows) in (1, max(q.rows, k.rows)):
        plan(pattern, q, k, 8, 8, apart=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_choice_says_why_the_kernels_cannot(dtype: torch.dtype, device: str) -> None:
    call = {"queries": 8192, "keys": 8192, "heads": 8, "dtype": dtype, "device": device}
    choice = choose(Chunks(512), **call)  # type: ignore[arg-type]
    assert choice.what == "banded"
    reasons = dict(choice.rejected)
    if dtype != torch.float64:
        assert "support Chunks, which has no primitive" in reasons["native" if device == "cpu" else "flex"]
    q = torch.randn(1, 2, 70, 16)
    with pytest.raises(
        BackendError, match=r"native.* cannot run this call: its kernels do not support Chunks, .*take sdpa"
    ):
        attend(q, q, q, Chunks(512), backend="native")


@pytest.mark.parametrize(
    ("pattern", "n"),
    [
        (Chunks(6), 33),
        (Recent(5), 700),
        pytest.param(PerHead(Chunks(6), Even()), 33, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_an_own_pattern_runs_in_graphs(pattern: Pattern, n: int) -> None:
    inputs = [torch.randn(1, 2, n, 16) for _ in range(3)]
    compiled = torch.compile(lambda q, k, v: attend(q * 2, k, v, pattern), backend="aot_eager")(*inputs)
    torch.testing.assert_close(compiled, attend(inputs[0] * 2, *inputs[1:], pattern), rtol=1e-5, atol=1e-5)


# -- a backend: a value and a line -------------------------------------------------------------------------------


def weights(call: Call, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (weights, lse, values) of a key set, computed with torch's plainest functions."""
    part, group = call.keys[number], call.heads.group
    k, v = (t.to(call.work_dtype).repeat_interleave(group, 1) for t in (part.k, part.v))
    mask = visible(call.pattern, call.q_tokens, part.tokens)
    unseen = ~mask.any(-2).unsqueeze(-1)
    scores = call.q.to(k.dtype) @ k.masked_fill(unseen, 0.0).mT * call.scale
    scores = scores.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    return torch.softmax(scores, -1).nan_to_num(0.0), lse, v.masked_fill(unseen, 0.0)


def forward(call: Call, lse: bool) -> Partial:
    parts = []
    for number in range(len(call.keys)):
        p, sums, v = weights(call, number)
        parts.append(Partial((p @ v).to(call.q.dtype), sums))
    return merge_all(parts)


def backward(call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor) -> Gradients:
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (call.q, *(t for s in call.keys for t in (s.k, s.v)))]
        pairs_of = zip(call.keys, leaves[1::2], leaves[2::2], strict=True)
        keys = tuple(KeyValues(k, v, part.tokens) for part, k, v in pairs_of)
        result = forward(Call(leaves[0], call.q_tokens, keys, call.pattern, call.heads, call.scale), True)
        seen = result.lse > float("-inf")
        total = (result.out * d_out).sum() + (
            result.lse.masked_fill(~seen, 0.0) * d_lse.masked_fill(~seen, 0.0)
        ).sum()
    q, *d_keys = torch.autograd.grad(total, leaves)
    return Gradients(q, d_keys[::2], d_keys[1::2], [])


PLAIN = Capabilities(dropout=False, scores=False, stores_scores=True)
OURS = {
    "by-autograd": Backend("by-autograd", "for a test", forward, capabilities=PLAIN),
    "by-hand": Backend("by-hand", "for a test", forward, backward, PLAIN),
}


@pytest.fixture(params=OURS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(select, "BACKENDS", {**BACKENDS})
    monkeypatch.setattr(select, "POLICY", [*select.POLICY])
    register(OURS[request.param], Rule(OURS[request.param], "it is wanted for long rows", _short))
    yield request.param
    select.call_cache.forget()


def _short(at: select.Situation) -> str | None:
    return "the row is short" if at.pairs < 400 else None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", [Causal(), Window.around(3, step=2) | GlobalKeys(), Chunks(6)], ids=str)
def test_an_own_backend_runs_like_ours(backend: str, pattern: Pattern, dtype: torch.dtype) -> None:
    for i, kind in enumerate(TOKENS):
        check(pattern, HEADS[i % 3], Rotary(pairing="halves"), backend, kind, dtype, (2, 67)[i % 2])


def test_an_own_backend_is_chosen_by_its_rule_and_says_what_it_cannot(backend: str) -> None:
    choice = choose(Causal(), queries=20, keys=20, heads=2)
    assert (choice.what, choice.why, choice.bytes) == (backend, "it is wanted for long rows", 4.0 * 2 * 400)
    short = choose(Causal(), queries=8, keys=8, heads=2)
    assert short.rejected[0] == (backend, "the row is short")
    scored = choose(Causal(), queries=20, keys=20, heads=2, score=(ALiBi(),))
    assert scored.rejected[0] == (backend, "it does not support score=ALiBi")
    q = torch.randn(1, 2, 20, 8)
    with pytest.raises(
        BackendError, match=rf'backend="{backend}" cannot run this call: it does not support dropout'
    ):
        attend(q, q, q, Causal(), dropout=0.5, backend=backend)
    with pytest.raises(BackendError, match="there is a backend 'banded' already"):
        register(BACKENDS["banded"])


def test_an_own_backend_with_a_backward_is_differentiable_in_both_parts_once(backend: str) -> None:
    at = Tokens.from_lengths([9, 5], 9)
    q, k, v = (torch.randn(2, h, 9, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))

    def both(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        sets = [KeyValues(*(t[:, :, a:b] for t in inputs[1:]), at.slice(a, b)) for a, b in ((0, 4), (4, 9))]
        part = attend_keys(inputs[0], at, sets, Causal(), backend=backend)
        return part.out, part.lse.masked_fill(part.lse == -float("inf"), 0.0)

    assert torch.autograd.gradcheck(both, (q, k, v), fast_mode=True)
    if OURS[backend].backward is not None:
        with pytest.raises(BackendError, match=rf"need backend=\"dense\"; this call ran on '{backend}'"):
            torch.autograd.grad(both(q, k, v)[0].square().sum(), q, create_graph=True)
