"""Keys and values in int8: bounds of their rounding, and that every backend reads the same numbers."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.attention import KeyValues, attend, attend_keys
from headway.attention.backends.native import torch_op as native_op
from headway.attention.call import validate
from headway.attention.select import BACKENDS
from headway.errors import BackendError, PatternError
from headway.patterns import Causal, GlobalKeys, Pattern, PerHead, Sink, Window
from headway.quantization import LARGEST, dequantize, quantize, row_bytes
from headway.tokens import Tokens
from tests.naive import naive
from tests.native.presence import needs_kernels
from tests.tolerance import assert_within_reference

DIVISION = 0.5 + LARGEST * 2**-23
"""Largest error in steps: half a step, plus the rounding of x / scale (half an ulp of up to 127) and of the scale."""
WINDOW = Window.last(9) | Causal() & Sink(2)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Returns float32 rows of very different magnitudes."""
    source = torch.Generator().manual_seed(seed)
    size = torch.exp(20 * torch.rand(*shape[:-1], 1, generator=source) - 10)
    return torch.randn(shape, generator=source) * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [1, 3, 64, 200])
def test_numbers_are_off_by_at_most_half_a_step(dtype: torch.dtype, width: int) -> None:
    x = numbers(50, 40, width).to(dtype)
    q, scale = quantize(x)
    assert (q.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, x.shape[:-1])
    step = scale.double().unsqueeze(-1)
    assert ((x.double() - q * step).abs() <= DIVISION * step).all()
    assert torch.equal(q.abs().amax(-1), torch.full(x.shape[:-1], LARGEST, dtype=torch.int8))
    torch.testing.assert_close(scale.double() * LARGEST, x.double().abs().amax(-1), rtol=2**-23, atol=0)


def test_a_step_less_and_the_law_breaks() -> None:
    x = numbers(50, 64)
    q, scale = quantize(x)
    step = scale.double().unsqueeze(-1)
    assert ((x.double() - q * step).abs() > 0.49 * step).any()


def test_rounding_again_changes_no_bit() -> None:
    q, scale = quantize(numbers(4096, 64))
    again = quantize(dequantize(q, scale, torch.float32))
    assert torch.equal(again[0], q)
    assert torch.equal(again[1], scale)
    mantissas = torch.arange(2**23, dtype=torch.int32).add_(127 << 23).view(torch.float32).view(-1, 1)
    q, scale = quantize(mantissas)
    assert torch.equal(quantize(dequantize(q, scale, torch.float32))[1], scale), "every mantissa there is"


def test_ties_go_to_even_and_signs_are_kept() -> None:
    q, scale = quantize(torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -127.0]))
    assert scale == 1.0
    assert q.tolist() == [0, 2, 2, 0, -2, -127]


def test_zeros_stay_zeros_and_faults_spoil_their_row_alone() -> None:
    bad = float("nan"), float("inf"), -float("inf")
    x = torch.tensor([[0.0, 0.0], *([b, 1.0] for b in bad), [3.0, -1.0], [1e-45, 0.0], [3e38, -3e38]])
    q, scale = quantize(x)
    restored = dequantize(q, scale, torch.float32)
    assert scale[0] == 0
    assert restored[0].tolist() == [0.0, 0.0]
    assert restored[1:4].isnan().all()
    torch.testing.assert_close(restored[4], x[4], rtol=0, atol=3 / 254)
    assert restored[5].tolist() == [0.0, 0.0], "less than a step can say"
    torch.testing.assert_close(restored[6], x[6])


def test_bytes_of_a_row() -> None:
    assert row_bytes(128, torch.bfloat16) == 256
    assert row_bytes(128, torch.int8) == 132


def set_of(
    slots: int, heads: int = 2, dims: tuple[int, int] = (16, 16), at: Tokens | None = None
) -> KeyValues:
    k, v = (torch.randn(2, heads, slots, d) for d in dims)
    return KeyValues(k, v, Tokens.range(slots) if at is None else at).quantized()


def test_sets_are_cut_joined_and_made_numbers_alike() -> None:
    whole = set_of(11)
    parts = [whole.slice(0, 4), whole.slice(4, 11)]
    joined = KeyValues.cat(parts)
    assert all(torch.equal(a, b) for a, b in zip(joined.tensors, whole.tensors, strict=True))
    assert joined.tokens.start == 0
    plain = whole.dequantized(torch.float64)
    assert plain.dequantized(torch.float32) is plain
    assert not plain.is_int8
    assert torch.equal(plain.k, (whole.k.float() * whole.k_scale.unsqueeze(-1)).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("backend", ["auto", *(name for name in BACKENDS if name not in ("flex", "triton"))])
@pytest.mark.parametrize(
    "pattern", [Causal(), WINDOW, PerHead(Causal(), WINDOW, WINDOW, Causal() & GlobalKeys())], ids=str
)
def test_every_backend_reads_the_same_numbers(pattern: Pattern, backend: str, dtype: torch.dtype) -> None:
    at = Tokens.range(33).with_global([3])
    part, q = set_of(33, at=at), torch.randn(2, 4, 33, 16).to(dtype)
    call = validate(q, at, [part], pattern.heads[0], None, (), None, 0.0, None)
    if backend != "auto" and (reason := BACKENDS[backend].unsupported_reason(call, False, "cpu")):
        with pytest.raises(BackendError, match=re.escape(reason)):
            attend_keys(q, at, [part], pattern, backend=backend)
        return
    plain, exact = part.dequantized(dtype), part.dequantized(torch.float64)
    tokens = {"q_tokens": at, "k_tokens": at}
    actual = attend(
        q, part.k, part.v, pattern, **tokens, backend=backend, k_scale=part.k_scale, v_scale=part.v_scale
    )
    if backend not in ("auto", "native"):
        assert torch.equal(actual, attend(q, plain.k, plain.v, pattern, **tokens, backend=backend))
    assert_within_reference(
        actual,
        naive(q.double(), exact.k, exact.v, pattern, at, at),
        naive(q, plain.k, plain.v, pattern, at, at),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sets_of_both_kinds_are_merged(dtype: torch.dtype) -> None:
    stored, at = set_of(40), Tokens.range(7, start=33)
    q = torch.randn(2, 4, 7, 16).to(dtype)
    mixed = [stored.slice(0, 20), stored.dequantized(dtype).slice(20, 40)]
    plain, exact = (stored.dequantized(d) for d in (dtype, torch.float64))
    actual = attend_keys(q, at, mixed, Causal())
    truth = naive(q.double(), exact.k, exact.v, Causal(), at, stored.tokens)
    assert_within_reference(actual.out, truth, naive(q, plain.k, plain.v, Causal(), at, stored.tokens))


def test_the_output_moves_no_more_than_the_steps_allow() -> None:
    """|o' - o| <= (exp(2 e) - 1) max |v| + max v_scale / 2, where no score moves by more than
    e = |q|_1 max k_scale / 2 sqrt(D)."""
    for seed in range(5):
        torch.manual_seed(seed)
        k, v, q = torch.randn(1, 2, 50, 32), torch.randn(1, 2, 50, 32), torch.randn(1, 4, 50, 32)
        part = KeyValues(k, v, Tokens.range(50)).quantized()
        exact = naive(*(t.double() for t in (q, k, v)), Causal(), part.tokens, part.tokens)
        plain = part.dequantized(torch.float64)
        moved = naive(q.double(), plain.k, plain.v, Causal(), part.tokens, part.tokens)
        k_scale, v_scale = (t.double().max() * (1 + 1e-5) for t in part.scales)
        e = q.double().abs().sum(-1).max() * k_scale / 2 * 32**-0.5
        bound = (torch.exp(2 * e) - 1) * v.abs().max() + v_scale / 2
        assert 0 < (moved - exact).abs().max() <= bound


@needs_kernels
def test_the_operator_takes_the_scales() -> None:
    part, q = set_of(21), torch.randn(2, 4, 21, 16)
    sets = [part.slice(0, 9), part.slice(9, 15).dequantized(q.dtype), part.slice(15, 21)]
    call = validate(q, part.tokens, sets, Causal(), None, (), None, 0.0, None)
    expected = attend_keys(q, part.tokens, sets, Causal(), backend="native")
    actual = native_op.run(call)
    assert torch.equal(actual.out, expected.out)
    assert torch.equal(actual.lse, expected.lse)
    torch.library.opcheck(torch.ops.headway.attend.default, native_op.arguments(call))


Change = Callable[[dict[str, Any]], None]
BAD: dict[str, tuple[Change, str]] = {
    "no scales": (
        lambda a: a.update(k_scale=None, v_scale=None),
        "must be floating point, got torch.int8; int8 keys and values need k_scale and v_scale",
    ),
    "one scale": (lambda a: a.update(v_scale=None), "give k_scale and v_scale both or neither"),
    "one scale of numbers": (
        lambda a: a.update(k=a["k"].float(), v=a["v"].float(), k_scale=None),
        "give k_scale and v_scale both or neither",
    ),
    "scales of numbers": (
        lambda a: a.update(v=a["v"].float()),
        "k_scale and v_scale are for int8 keys and values, got torch.float32",
    ),
    "a scale per row": (
        lambda a: a.update(k_scale=a["k_scale"][..., :1]),
        "must be float32 [2, 2, 5] on cpu, a number for each row, kv head and slot; got torch.float32 [2, 2, 1]",
    ),
    "scales in bfloat16": (
        lambda a: a.update(v_scale=a["v_scale"].bfloat16()),
        "must be float32 [2, 2, 5] on cpu, a number for each row, kv head and slot; got torch.bfloat16 [2, 2, 5]",
    ),
    "gradients": (
        lambda a: a.update(q=a["q"].requires_grad_()),
        "int8 keys and values have no backward; call it under torch.no_grad()",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_read_is_refused(what: str) -> None:
    change, message = BAD[what]
    part = set_of(5)
    arguments = {"k": part.k, "v": part.v, "k_scale": part.k_scale, "v_scale": part.v_scale}
    arguments = {"q": torch.randn(2, 4, 5, 16), **arguments}
    change(arguments)
    with pytest.raises(PatternError, match=re.escape(message)):
        attend(pattern=Causal(), **arguments)
    if what == "gradients":
        with torch.no_grad():
            attend(pattern=Causal(), **arguments)
