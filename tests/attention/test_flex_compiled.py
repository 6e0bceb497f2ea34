"""The flex backend compiled: how many kernels it builds, that they skip blocks, and when it is chosen."""

from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from headway.attention import KeyValues, attend, attend_keys, choose
from headway.attention.backends.flex import backend as flex
from headway.attention.backends.triton import backend as split_decode
from headway.attention.call import validate
from headway.errors import BackendError
from headway.patterns import Causal, Pattern, Sink, Window
from headway.scores import ALiBi, Bias, SoftCap
from headway.tokens import Tokens
from tests.attention import test_flex
from tests.attention.test_flex import (
    DEVICE,
    DTYPE,
    LONG,
    PACKED,
    RANGE,
    assert_same,
    lists,
    named,
    on_device,
    qkv,
)
from tests.tolerance import assert_within_reference

pytestmark = test_flex.pytestmark


def test_one_kernel_serves_a_form_of_call_and_two_serve_all_lengths() -> None:
    """New contents never recompile; a second length recompiles once, with a symbolic length; a third does not.

    Each pattern counts for itself: it starts with fixed lengths whatever another pattern has compiled.
    """
    rows = (([300, 20], 300), ([150, 280], 300), ([200, 350], 450), ([280, 90], 600))
    for pattern in (Window.last(17) | Sink(1), Window.last(18) | Sink(1)):
        built: list[int] = []
        for lengths, total in rows:
            at = on_device(Tokens.from_lengths(lengths, total))
            q, k, v = qkv(at, at)
            before = counters["stats"]["unique_graphs"]
            actual = attend_keys(q, at, [KeyValues(k, v, at)], pattern, backend="flex")
            built.append(counters["stats"]["unique_graphs"] - before)
            assert_same(actual, q, k, v, at, at, pattern)
        assert built == [1, 0, 1, 0]


@pytest.mark.slow
def test_patterns_do_not_use_up_each_others_compilations() -> None:
    """torch gives up after a few compilations of one code object, so each form of call has its own object."""
    at = on_device(Tokens.range(32))
    q, k, v = qkv(at, at)
    for reach in range(torch._dynamo.config.recompile_limit + 2):
        actual = attend_keys(q, at, [KeyValues(k, v, at)], Window.last(reach + 2), backend="flex")
        assert_same(actual, q, k, v, at, at, Window.last(reach + 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "q", "k"),
    [
        (Causal(), LONG, LONG),
        (Window.last(140), Tokens.range(400, 200), Tokens.range(600)),
        (Window.around(20) | Sink(3), PACKED, PACKED),
    ],
    ids=named,
)
def test_kernels_in_blocks_read_the_lists(pattern: Pattern, q: Tokens, k: Tokens) -> None:
    """torch's compiled CPU kernel visits the listed tiles only: with empty lists it sees nothing."""
    call = [torch.randn(2, h, t.count, 16) for h, t in ((4, q), (2, k), (2, k))]
    checked = validate(call[0], q, [KeyValues(call[1], call[2], k)], pattern, None, (), None, 0.0, None)
    compiled = flex._compiled
    with mock.patch.object(flex, "_compiled", lambda form, fused: compiled(form, True)):
        out = flex.forward(checked, lse=False).out
        with (
            mock.patch.object(
                flex, "_lists", lambda t: (torch.zeros_like(t[:, None, :, 0], dtype=torch.int32), lists(t)[1])
            ),
            mock.patch.object(flex, "_ordered", flex._order),
        ):
            nothing = flex.forward(checked, lse=False).out
    exact = attend(*(t.double() for t in call), pattern, q_tokens=q, k_tokens=k, backend="dense")
    low = attend(*call, pattern, q_tokens=q, k_tokens=k, backend="dense")
    assert_within_reference(out, exact, low)
    assert (nothing == 0).all()


def test_refusals_say_why() -> None:
    at = on_device(RANGE)
    q, k, v = qkv(at, at)
    keep = torch.ones(1, 1, 150, 150, dtype=torch.bool, device=DEVICE)
    bias = Bias(torch.zeros(1, 1, 150, 150, dtype=DTYPE, device=DEVICE))
    for options, message in (
        ({"dropout": 0.1}, "does not support dropout"),
        ({"keep": keep}, "does not support a keep mask"),
        ({"score": bias}, "does not support a bias tensor per slot"),
    ):
        with pytest.raises(BackendError, match=f'backend="flex" cannot run this call: .*{message}'):
            attend(q, k, v, Causal(), backend="flex", **options)
    if DEVICE == "cpu":
        with pytest.raises(BackendError, match="it has no backward on cpu"):
            attend(q.requires_grad_(), k, v, Causal(), backend="flex")
        with pytest.raises(BackendError, match="it runs on cuda, not on cpu"):
            attend(q.detach(), k, v, Causal(), backend="triton")


def test_choices_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_decode, "has_triton", lambda: True)

    def what(pattern: Pattern, queries: int, keys: int, **options) -> str:  # type: ignore[no-untyped-def]
        return choose(pattern, queries=queries, keys=keys, heads=8, kv_heads=2, device="cuda", **options).what

    assert what(Causal(), 4096, 4096) == "sdpa"
    assert what(Causal(), 1, 4096) == "sdpa"
    assert what(Window.last(512), 8192, 8192) == "flex"
    assert what(Window.last(512), 8192, 8192, gradient=True) == "flex"
    assert what(Causal(), 4096, 4096, score=(ALiBi(),)) == "flex"
    assert what(Causal(), 512, 8192) == "flex"
    assert what(Window.last(512), 1, 8192, paged=True) == "triton"
    assert what(Window.last(512), 16, 8192, score=(ALiBi(),)) == "dense"
    assert what(Window.last(512), 64, 8192) == "flex"
    assert what(Window.last(512), 8192, 8192, dropout=0.1) == "banded"
    assert what(Window.last(8), 64, 64, score=(SoftCap(3.0),)) == "dense"
    double = choose(Window.last(512), queries=8192, keys=8192, heads=8, device="cuda", dtype=torch.float64)
    assert double.what == "banded"
    assert ("flex", "FlexAttention's CUDA kernel has no float64") in double.rejected
    narrow = choose(Window.last(512), queries=8192, keys=8192, heads=8, device="cuda", head_dim=8)
    assert ("flex", "FlexAttention's CUDA kernel takes head sizes from 16 to 256, not [8]") in narrow.rejected
    monkeypatch.setattr(split_decode, "has_triton", lambda: False)
    plain = choose(Window.last(512), queries=12, keys=8192, heads=8, device="cuda", paged=True)
    assert ("triton", "Triton is not installed here (pip install triton)") in plain.rejected


def test_choices_on_a_cpu_never_name_what_is_for_cuda() -> None:
    for queries in (1, 64, 8192):
        choice = choose(Window.last(512), queries=queries, keys=8192, heads=8, paged=True)
        assert choice.what not in ("flex", "triton")
