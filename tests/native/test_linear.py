"""Products of rows: with float weights against float64, with weights of 8 and 4 bits against exact integers."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.block_quantization import PARTS
from headway.errors import BackendError
from headway.native.block_panels import BlockPanels
from headway.native.linear import linear
from headway.native.panels import Panels
from headway.nn.weights import Nf4
from headway.quantization import QuantizedMatrix, quantize_weights
from tests.native.conftest import EVERY_LEVEL, Use, at_levels
from tests.native.weights import drawn, rounded
from tests.tolerance import assert_rounded_once, assert_within_reference

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [
    (1, 1, 1),
    (2, 16, 32),
    (3, 17, 33),
    (5, 50, 64),
    (8, 33, 200),
    (9, 64, 515),
    (23, 7, 31),
    (70, 50, 200),
]
"""Rows, outputs, inputs."""
FORMS = [(8, None, True), (8, None, False), (8, 32, True), (4, 32, True), (4, 32, False), (4, 128, False)]
"""(bits, group, symmetric)."""


def exactly(x: Tensor, matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """Returns the product of the rounded rows and the dequantized weights, in `dtype`."""
    q, scale = (t.to(dtype) for t in rounded(x))
    rounded_x = (q * scale.unsqueeze(2)).flatten(1)[:, : x.shape[1]]
    weight_scale, zero = (
        t.to(dtype).repeat_interleave(matrix.group, 1)[:, : x.shape[1]]
        for t in (matrix.scale, matrix.zero_or_middle)
    )
    return rounded_x @ (weight_scale * (matrix.codes.to(dtype) - zero)).T


def assert_sums(check: str, actual: Tensor, expected: Tensor, reference: Tensor, terms: Tensor) -> None:
    """Checks that sums in float32 err as those of torch, `reference`, and that sums in bf16 are rounded once."""
    if actual.dtype == torch.bfloat16:
        assert_rounded_once(actual, expected, check, terms)
    else:
        assert_within_reference(actual, expected, reference, check, terms, check)


@at_levels(0, EVERY_LEVEL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", DTYPES)
def test_float_weights(use: Use, level: str, dtype: torch.dtype, weights: torch.dtype) -> None:
    use(level)
    generator = torch.Generator().manual_seed(0)
    for rows, outputs, inputs in SIZES:
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        w = torch.randn(outputs, inputs + 3, generator=generator).to(weights)[:, 1 : inputs + 1]  # unaligned
        b = torch.randn(outputs, generator=generator)
        (actual,) = linear(x, [w], [b])
        expected = x.double() @ w.double().T + b.double()
        assert_sums("products", actual, expected, F.linear(x.float(), w.float(), b), inputs**0.5)


@at_levels(1, EVERY_LEVEL)
def test_what_lies_in_the_middle_of_two_numbers_is_rounded_to_the_even_one(use: Use, level: str) -> None:
    """Sums of whole numbers, exact in float32; every tenth of them is halfway between two numbers of bf16."""
    use(level)
    for rows, outputs, inputs in SIZES:
        x, w = (torch.randint(-9, 10, (n, inputs)).bfloat16() for n in (rows, outputs))
        expected = (x.double() @ w.double().T).bfloat16()
        for weights in (w, w.float()):
            assert torch.equal(linear(x, [weights])[0], expected)


@at_levels(2, EVERY_LEVEL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group", "symmetric"), FORMS)
def test_codes(
    use: Use, level: str, dtype: torch.dtype, bits: int, group: int | None, symmetric: bool
) -> None:
    use(level)
    generator = torch.Generator().manual_seed(0)
    for rows, outputs, inputs in SIZES:
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        quantized = quantize_weights(
            torch.randn(outputs, inputs, generator=generator), bits, group, symmetric=symmetric
        )
        matrix = (
            QuantizedMatrix(
                quantized.codes, quantized.scale.half().float(), quantized.zero, bits, quantized.group
            )
            if group
            else quantized
        )
        (actual,) = linear(x, [Panels.pack(matrix)])
        expected, reference = (exactly(x, matrix, dtype) for dtype in (torch.float64, torch.float32))
        terms = x.double().norm(dim=1, keepdim=True) * matrix.dequantize(torch.float64).square().mean().sqrt()
        assert_sums(f"products of {bits} bits", actual, expected, reference, terms)


@at_levels(3, EVERY_LEVEL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gets_the_same_bits_alone_and_among_many(use: Use, level: str, dtype: torch.dtype) -> None:
    use(level)
    generator = torch.Generator().manual_seed(0)
    for rows, outputs, inputs in [
        (9, 1, 1),
        (14, 50, 65),
        (16, 40, 33),
        (65, 17, 64),
        (193, 70, 96),
        (300, 33, 1100),
    ]:
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        w, b = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
        for bits, group, symmetric in FORMS:
            packed = Panels.pack(quantize_weights(w, bits, group, symmetric=symmetric))
            (many,) = linear(x, [packed], [b])
            few = [linear(x[first : first + 3], [packed], [b])[0] for first in range(0, rows, 3)]
            assert torch.equal(many, torch.cat(few)), (rows, outputs, inputs, bits, group, symmetric)


@at_levels(4, EVERY_LEVEL)
@pytest.mark.parametrize("rows", [12, 250])
def test_several_matrices_share_rows_and_threads_change_no_bit(use: Use, level: str, rows: int) -> None:
    use(level)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, rows // 2, 96, generator=generator)
    matrices = [torch.randn(40, 96, generator=generator), torch.randn(8, 96, generator=generator).bfloat16()]
    packed = [Panels.pack(quantize_weights(matrices[0], bits, 32)) for bits in (8, 4)]
    previous = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(linear(x, [*matrices, *packed]))
    finally:
        torch.set_num_threads(previous)
    alone = [linear(x, [matrix])[0] for matrix in (*matrices, *packed)]
    for result in results:
        assert [tuple(y.shape[2:]) for y in result] == [(40,), (8,), (40,), (40,)]
        assert all(torch.equal(y, expected) for y, expected in zip(result, alone, strict=True))


@at_levels(5, EVERY_LEVEL)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [3, 70])
def test_what_is_no_number_stays_in_its_row(use: Use, level: str, bad: float, rows: int) -> None:
    use(level)
    w = torch.randn(20, 70, generator=torch.Generator().manual_seed(0))
    in_groups = [Panels.pack(quantize_weights(w, bits, 32)) for bits in (8, 4)]
    in_blocks = [BlockPanels.pack(drawn(20, 512, bits)) for bits in PARTS]
    nf4 = Nf4.pack(torch.randn(20, 192)).native()
    for inputs, matrices in ((70, [w, w.bfloat16(), *in_groups]), (512, in_blocks), (192, [nf4])):
        for dtype in DTYPES:
            x = torch.ones(rows, inputs, dtype=dtype)
            x[1, inputs * 4 // 7] = bad
            for y in linear(x, matrices):
                assert not y[1].isfinite().any()
                assert y[torch.arange(rows) != 1].isfinite().all()


@given(st.integers(1, 40), st.integers(1, 100), st.sampled_from([8, 4]), st.booleans())
def test_a_code_is_off_by_half_a_step(outputs: int, inputs: int, bits: int, symmetric: bool) -> None:
    w = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs))
    quantized = quantize_weights(w, bits, 32, symmetric=symmetric)
    step = quantized.scale.repeat_interleave(32, 1)[:, :inputs]
    slack = 0.5 if symmetric else 1.0  # the zero is rounded as well
    assert bool(((quantized.dequantize() - w).abs() <= step * slack * (1 + 1e-5) + 1e-7).all())


def test_what_the_kernels_refuse() -> None:
    w = torch.ones(4, 8)
    with pytest.raises(BackendError, match="float32 and bf16"):
        linear(torch.ones(1, 8, dtype=torch.float64), [w])
    with pytest.raises(BackendError, match="contiguous rows"):
        linear(torch.ones(1, 4), [w.T])
    with pytest.raises(BackendError, match="multiple of 32"):
        Panels.pack(quantize_weights(torch.ones(4, 96), 4, 48))
