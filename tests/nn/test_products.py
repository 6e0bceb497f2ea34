"""Products on oneDNN and widened products of bf16 against float64, forward and backward; and which ones torch's own
path keeps."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headway.nn import products
from headway.nn.products import FEW, filled_rows, linear
from tests.memory import resident
from tests.tolerance import assert_within_reference

EMULATES = products._emulates_bf16
SIZES = [((2, FEW // 2), 16, 32), ((FEW + 1,), 1, 1), ((FEW,), 33, 7), ((3, 5, 11), 257, 130)]


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(products, "_slow_mkl", lambda: True)
    monkeypatch.setattr(products, "_emulates_bf16", lambda: False)


def results(run: object, tensors: list[Tensor], dy: Tensor, dtype: torch.dtype) -> list[Tensor]:
    inputs = [t.detach().to(dtype).requires_grad_() for t in tensors]
    assert callable(run)
    y = run(*inputs)
    return [y, *torch.autograd.grad(y, inputs, dy.to(dtype))]


@pytest.mark.parametrize("bias", [False, True])
def test_they_are_products_and_so_are_their_gradients(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape, inputs, outputs in SIZES:
        x = torch.randn(*shape, 2 * inputs, generator=generator)[..., :inputs]
        tensors = [x, torch.randn(outputs, inputs, generator=generator)]
        tensors += [torch.randn(outputs, generator=generator)] * bias
        dy = torch.randn(*shape, outputs, generator=generator)
        exact, plain = (results(F.linear, tensors, dy, dtype) for dtype in (torch.float64, torch.float32))
        for actual, expected, reference in zip(
            results(linear, tensors, dy, torch.float32), exact, plain, strict=True
        ):
            assert_within_reference(actual, expected, reference, f"{shape} {inputs} {outputs}")


@pytest.mark.parametrize("bias", [False, True])
def test_bf16_without_an_instruction_is_widened_and_rounded_once(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, and without recorded gradients: the float64 result of the same numbers, in bf16."""
    monkeypatch.setattr(products, "_emulates_bf16", lambda: True)
    generator = torch.Generator().manual_seed(0)
    for shape, inputs, outputs in SIZES:
        tensors = [
            torch.randn(*shape, inputs, generator=generator),
            torch.randn(outputs, inputs, generator=generator),
        ]
        tensors = [t.bfloat16() for t in tensors + [torch.randn(outputs, generator=generator)] * bias]
        dy = torch.randn(*shape, outputs, generator=generator).bfloat16()
        exact, plain = (results(F.linear, tensors, dy, dtype) for dtype in (torch.float64, torch.bfloat16))
        for actual, expected, reference in zip(
            results(linear, tensors, dy, torch.bfloat16), exact, plain, strict=True
        ):
            assert actual.dtype == torch.bfloat16
            assert_within_reference(actual, expected, reference, f"{shape} {inputs} {outputs}")
        x, rows = tensors[0].reshape(-1, inputs), dy.reshape(-1, outputs)
        for actual, expected in (
            (products.forward_product(x, tensors[1]), x.double() @ tensors[1].double().T),
            (products.input_product(rows, tensors[1]), rows.double() @ tensors[1].double()),
            (products.weight_product(rows, x), rows.double().T @ x.double()),
        ):
            error = (actual.double() - expected).abs()
            assert (error <= 2.0**-8 * expected.abs() + 1e-5 * expected.abs().max()).all()


def test_bf16_is_widened_where_torch_has_no_instruction_for_it() -> None:
    assert EMULATES() is not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_second_derivatives_are_those_of_torch() -> None:
    x, weight = torch.randn(FEW, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)

    def second(run: object) -> list[Tensor]:
        assert callable(run)
        grads = torch.autograd.grad(run(x, weight).square().sum(), (x, weight), create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in grads), (x, weight)))

    for actual, expected in zip(second(linear), second(F.linear), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_same_bits_whatever_else_is_there(dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(*size).to(dtype) for size in ((2, 300, 48), (70, 48), (70,)))
    with torch.inference_mode():
        full = linear(x, weight, bias)
        assert full.shape == (2, 300, 70)
        for rows in (FEW, FEW + 1, 127, 200, 299):
            assert linear(x[0, :rows], weight, bias).equal(full[0, :rows])


def test_rows_are_padded_only_where_kernels_are_compiled_for_them() -> None:
    for dtype, rows, added in (
        (torch.float32, FEW - 1, 0),
        (torch.float32, FEW + 1, 15),
        (torch.bfloat16, 1, 15),
        (torch.bfloat16, 33, 15),
        (torch.float64, FEW + 1, 0),
    ):
        assert products.added_rows(torch.zeros(rows, 4, dtype=dtype)) == added
    with torch.autocast("cpu", torch.bfloat16):
        assert products.added_rows(torch.zeros(1, 4)) == 15


def test_few_numbers_of_rows_are_multiplied() -> None:
    numbers = range(FEW, 4097)
    assert len({filled_rows(rows) for rows in numbers}) == 45
    assert [filled_rows(rows) for rows in (0, 1, 7, 16, 17)] == [0, 16, 16, 16, 32]
    assert all(rows <= filled_rows(rows) <= 1.25 * rows for rows in numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_any_number_of_rows_take_little_memory(dtype: torch.dtype) -> None:
    """300 numbers of rows, whose own kernels would take 0.3 MB and more each."""
    weight = torch.randn(72, 40).to(dtype)
    with torch.inference_mode():
        linear(torch.randn(FEW, 40).to(dtype), weight)
        before = resident()
        for rows in range(FEW, FEW + 300):
            linear(torch.randn(rows, 40).to(dtype), weight)
    assert resident() - before < 25e6


def test_few_rows_and_other_dtypes_and_who_looks_on_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_onednn", None)
    weight = torch.randn(5, 6)
    linear(torch.randn(FEW - 1, 6), weight)
    linear(torch.randn(FEW, 6).double(), weight.double())
    linear(torch.randn(FEW, 6).bfloat16(), weight.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.randn(FEW, 6), weight).dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        linear(torch.randn(FEW, 6), weight)
    assert counter.get_total_flops() == 2 * FEW * 6 * 5
    torch.func.vmap(lambda x: linear(x, weight))(torch.randn(2, FEW, 6))
