"""What the native backend caches, refuses, and passes to its kernels."""

import gc
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from headway.attention import KeyValues, attend, attend_keys
from headway.attention.backends.native import torch_op as native_op
from headway.attention.backends.native.backend import NATIVE
from headway.attention.backends.native.plan_arrays import PlanArrays, plan_arrays, program
from headway.attention.call import Call, validate
from headway.errors import BackendError, PatternError
from headway.native import interface as c
from headway.patterns import And, Causal, Full, Global, Or, Pattern, Sink, Window
from headway.patterns.primitives import Kind
from headway.patterns.program import OTHERS, height, lower
from headway.scores import ALiBi, Bias, RelativeBias, RelativeKey, Score, SoftCap
from headway.tokens import Tokens
from tests.attention.test_native_op import N, tensors
from tests.native.plain import Problem
from tests.native.presence import needs_kernels, pretend

CAUSAL = Causal()


def reason(
    *score: Score, pattern: Pattern = CAUSAL, at: Tokens | None = None, **options: object
) -> str | None:
    q = torch.randn(1, 4, 5, 8, **options)  # type: ignore[call-overload]
    at = Tokens.range(5) if at is None else at
    call = validate(q, at, [KeyValues(q, q, at)], pattern, None, score, None, 0.0, None)
    return NATIVE.unsupported_reason(call, False, "cpu")


@needs_kernels
def test_gradients_of_queries_read_keys_where_the_store_has_them() -> None:
    slots = torch.tensor([[9, 2, 5, 7, 0]], dtype=torch.int32)
    store = torch.full((1, 2, 12, 8), torch.nan)
    store[:, :, slots[0].long()] = torch.randn(1, 2, 5, 8)
    whole = store[:, :, slots[0].long()]
    at, gradients = Tokens.range(5), []
    for keys in (KeyValues(store, store, at, slots=slots), KeyValues(whole, whole, at)):
        q = torch.ones(1, 4, 5, 8, requires_grad=True)
        attend_keys(q, at, [keys], CAUSAL, backend="native").out.square().sum().backward()
        gradients.append(q.grad)
    assert torch.equal(*gradients)
    assert torch.equal(KeyValues.cat([KeyValues(store, store, at, slots=slots)] * 2).k[:, :, 5:], whole)
    assert torch.equal(
        KeyValues(store, store, at, slots=slots).quantized().k, KeyValues(whole, whole, at).quantized().k
    )


def test_obstacles_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, there=True)
    assert reason() is reason(SoftCap(3.0), ALiBi(), RelativeBias(torch.ones(32, 4))) is None
    assert reason(dtype=torch.bfloat16) is None
    assert reason(dtype=torch.float64) == "its kernels take float32 and bfloat16, not float64"
    assert reason(RelativeKey(torch.ones(3, 8))) == "its kernels do not support score=RelativeKey"
    assert reason(Bias(torch.ones(5, 5))) == "it does not support a bias tensor per slot"
    assert reason(*[SoftCap(3.0)] * 9) == "its kernels take up to 8 scores, not 9"
    assert reason(ALiBi((1.0, 2.0))) == "ALiBi is for 2 heads, the call has 4"
    assert reason(RelativeBias(torch.ones(32, 3))) == "RelativeBias is for 3 heads, the call has 4"
    moved = Tokens.range(5).with_position(torch.arange(5)[None] * 2)
    assert reason(SoftCap(3.0), at=moved) is None
    assert "compute the distances of ALiBi from indices" in str(reason(ALiBi(), at=moved))
    pretend(monkeypatch, there=False)
    assert reason() == "none were built"


def test_heads_that_are_too_wide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, there=True)
    for width, value, allowed in ((512, 512, True), (513, 8, False), (8, 513, False), (8, 0, False)):
        q, v = torch.ones(1, 1, 2, width), torch.ones(1, 1, 2, value)
        call = validate(
            q, Tokens.range(q.shape[2]), [KeyValues(q, v, Tokens.range(2))], Full(), None, (), None, 0.0, None
        )
        assert (NATIVE.unsupported_reason(call, False, "cpu") is None) == allowed, (width, value)


def deep(levels: int) -> Pattern:
    """Returns a pattern whose evaluation needs a stack of `levels` places."""
    pattern: Pattern = Causal()
    for i in range(levels - 1):
        pattern = (Or if i % 2 else And)((Window.last(i + 2), pattern))
    return pattern


@needs_kernels
def test_patterns_nest_as_deep_as_the_kernels_stack() -> None:
    assert height(lower(deep(c.DEEPEST))) == c.DEEPEST
    assert reason(pattern=deep(c.DEEPEST)) is None
    assert reason(pattern=deep(c.DEEPEST + 1)) == f"its kernels take patterns nested up to {c.DEEPEST} deep"
    at = Tokens.range(40)
    case = Problem.random(deep(c.DEEPEST), at, at)
    torch.testing.assert_close(case.run().out, case.formula().out)


def test_programs_are_postfix() -> None:
    pattern = Window.last(3, step=2) & Causal() | Sink(4)
    window, causal, sink = [Kind.WINDOW, -4, 0, 2], [Kind.CAUSAL, 0, 0, 1], [Kind.SINK, 4, 0, 0]
    assert program(pattern) == [*window, *causal, Kind.AND, 0, 0, 1, *sink, Kind.OR, 0, 0, 1]
    assert height(lower(pattern)) == 2
    assert program(Window(2**40, 2**50)) == [Kind.WINDOW, -(2**30), 2**30, 1]


def test_calls_that_are_known_without_looking_share_a_layout() -> None:
    def of(start: int, count: int = 40, pattern: Pattern = CAUSAL) -> PlanArrays:
        return plan_arrays(pattern, Tokens.range(count, start), Tokens.range(60), False)

    assert of(3) is of(3)
    assert len({id(of(3)), id(of(4)), id(of(3, 41)), id(of(3, pattern=Window.last(7)))}) == 4


def test_the_same_tokens_share_a_layout_until_they_change() -> None:
    q, k = Tokens.from_lengths([30, 40], 40), Tokens.packed([[10, 20], [40]], 40)
    first = plan_arrays(Causal(), q, k, False)
    assert plan_arrays(Causal(), q, k, False) is first
    assert plan_arrays(Window.last(3), q, k, False) is not first
    assert plan_arrays(Causal(), q, q, False) is not first
    k.index[0, 5] = -1
    changed = plan_arrays(Causal(), q, k, False)
    assert changed is not first
    assert plan_arrays(Causal(), q, k, False) is changed


def test_what_is_remembered_of_tokens_goes_with_them() -> None:
    q = Tokens.from_lengths([30, 40], 40)
    reference = weakref.ref(plan_arrays(Causal(), q, q, False))
    for n in range(3 * OTHERS):
        plan_arrays(Window.last(n + 1), q, q, False)
    assert len(plan_arrays.others[q]) <= OTHERS
    gc.collect()
    assert reference() is None
    alive = weakref.ref(plan_arrays(Causal(), q, q, False))
    del q
    gc.collect()
    assert alive() is None


@needs_kernels
def test_a_cache_that_writes_its_tokens_in_place_is_read_anew() -> None:
    index = torch.full((1, 50), -1)
    at = Tokens(index)
    k = torch.randn(1, 2, 50, 8)
    for n in range(1, 50):
        index[0, n] = n - 1
        query = Tokens.range(1, start=n - 1)
        q = torch.randn(1, 2, 1, 8)
        out = attend(q, k, k, Causal(), q_tokens=query, k_tokens=at, backend="native")
        seen_keys = k[:, :, 1 : n + 1]
        torch.testing.assert_close(out, torch.softmax(q @ seen_keys.mT * 8**-0.5, -1) @ seen_keys)
    with torch.inference_mode():
        ring = Tokens(torch.arange(50)[None].clone())
        for _ in range(2):
            query = Tokens(torch.tensor([[49]]))
            out = attend(q, k, k, Window.last(3), q_tokens=query, k_tokens=ring, backend="native")
            seen = (ring.index > 46)[0]
            seen_keys = k[:, :, seen]
            torch.testing.assert_close(out, torch.softmax(q @ seen_keys.mT * 8**-0.5, -1) @ seen_keys)
            ring.index.copy_(ring.index.flip(1))


@needs_kernels
def test_documents_of_any_number_are_told_apart() -> None:
    base = Tokens.packed([[5, 9, 6], [20]], 20)
    assert base.document is not None
    for step in (1, 2**30, 2**32, 2**40):
        at = Tokens(base.index, base.document * step)
        case = Problem.random(Causal(), at, at)
        torch.testing.assert_close(case.run().out, case.formula().out)


@needs_kernels
def test_tokens_beyond_what_32_bits_count_are_refused_in_words() -> None:
    q = torch.randn(1, 1, 3, 8)
    last = Tokens.range(3, start=2**30 - 3)
    actual = attend(q, q, q, Window.last(2), q_tokens=last, k_tokens=last, backend="native")
    torch.testing.assert_close(actual, attend(q, q, q, Window.last(2), backend="dense"))
    far = Tokens.range(3, start=2**30)
    with pytest.raises(
        BackendError, match=r'token index 1073741826 is not below 2\^30.*use backend="banded"'
    ):
        attend(q, q, q, Causal(), q_tokens=far, k_tokens=far, backend="native")


@needs_kernels
def test_wrong_scores_are_named_by_auto_and_by_name() -> None:
    q = torch.randn(1, 4, 99, 64)
    with pytest.raises(PatternError, match="ALiBi is for 3 heads, the call has 4"):
        attend(q, q, q, Causal(), score=ALiBi((1.0, 2.0, 3.0)))
    with pytest.raises(BackendError, match='backend="native" cannot run this call: ALiBi is for 3 heads'):
        attend(q, q, q, Causal(), score=ALiBi((1.0, 2.0, 3.0)), backend="native")
    with pytest.raises(BackendError, match="it does not support a keep mask"):
        attend(q, q, q, keep=torch.ones(1, 1, 99, 99, dtype=torch.bool), backend="native")
    twice = torch.randn(1, 4, 9, 8, requires_grad=True)
    out = attend(twice, twice, twice, Causal(), backend="native")
    with pytest.raises(BackendError, match=r"second derivatives.*dense.*'native'"):
        torch.autograd.grad(out.sum(), twice, create_graph=True)


@needs_kernels
def test_sets_of_keys_share_a_gradient_and_a_score() -> None:
    """The gradient of q and of a table is the sum over the sets, in bfloat16 rounded once."""
    at = Tokens.range(90).with_global([4])
    q, k = (torch.randn(1, 2, 90, 16).bfloat16().requires_grad_() for _ in range(2))
    table = torch.randn(32, 2, requires_grad=True)
    grads = []
    for cuts in ((0, 90), (0, 30, 31, 90)):
        sets = [KeyValues(k[:, :, a:b], k[:, :, a:b], at.slice(a, b)) for a, b in pairwise(cuts)]
        part = attend_keys(
            q, at, sets, Window.around(20) | Global(), score=RelativeBias(table), backend="native"
        )
        grads.append(torch.autograd.grad(part.out.float().square().sum() + part.lse.sum(), (q, k, table)))
    for whole, split in zip(*grads, strict=True):
        ulp = (
            torch.finfo(whole.dtype).eps if whole.dtype == torch.bfloat16 else torch.finfo(torch.bfloat16).eps
        )
        torch.testing.assert_close(
            whole.float(), split.float(), rtol=4 * ulp, atol=4 * ulp * whole.abs().max().item()
        )


def test_what_the_operator_cannot_say_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()

    def asked(t: Tensor = q, **changes: Any) -> Call:
        base = validate(
            t,
            Tokens.range(N),
            [KeyValues(k.to(t), v.to(t), Tokens.range(N))],
            Causal(),
            None,
            (),
            None,
            0.0,
            None,
        )
        return base if not changes else Call(**{**vars(base), **changes})

    def takes(call: Call) -> bool:
        return NATIVE.unsupported_reason(call, True, "cpu") is None

    assert takes(asked())
    assert not takes(asked(keep=torch.ones(1, 1, N, N, dtype=torch.bool)))
    assert not takes(asked(score=(RelativeKey(torch.ones(3, 16)),)))
    assert not takes(asked(q.double()))
    pretend(monkeypatch, there=False)
    assert not takes(asked())


def test_what_the_kernels_cannot_run_is_named() -> None:
    q, k, v = tensors()
    call = validate(
        q,
        Tokens.range(N),
        [KeyValues(k, v, Tokens.range(N))],
        Causal(),
        None,
        (ALiBi((1.0,)),),
        None,
        0.0,
        None,
    )
    with pytest.raises(BackendError, match=r"headway::attend cannot run this call: ALiBi is for 1 heads"):
        native_op.run(call)
