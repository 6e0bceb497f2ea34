"""Products with NF4 weights are those with the dequantized weights, at every level."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.errors import BackendError
from headway.native.linear import MOST_ROWS, linear
from headway.native.nf4 import Nf4Matrix
from headway.nn import Lora
from headway.nn.weights import Nf4
from tests.models.changes import adapted, both, kept_as
from tests.models.kinds import WIDE
from tests.models.test_decode_step import model, steps
from tests.native.conftest import Use, at_levels
from tests.native.test_linear import DTYPES, assert_sums

SIZES = [
    (1, 1, 64),
    (2, 16, 128),
    (3, 17, 192),
    (5, 50, 320),
    (9, 64, 512),
    (23, 7, 1024),
    (64, 40, 704),
    (200, 18, 192),
    (3, 2, 16448),
    (9, 3, 16448),
]
"""Rows, outputs, inputs: up to more blocks than share a largest scale, and rows longer than a line of weights."""


def drawn(outputs: int, inputs: int, seed: int = 0) -> Nf4:
    """Returns weights whose blocks have scales of every size, one of them 0."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(outputs, inputs, generator=generator)
    w = w.view(-1, 64) * torch.randn(w.numel() // 64, 1, generator=generator).exp()
    w[seed % len(w)] = 0.0
    return Nf4.pack(w.view(outputs, inputs))


def matrix_of(weight: Nf4) -> Nf4Matrix:
    matrix = weight.native()
    assert isinstance(matrix, Nf4Matrix)
    return matrix


def check_products(x: Tensor, weight: Nf4, b: Tensor) -> None:
    """Checks a product against the float64 product with the dequantized weights."""
    w = weight.dequantize(x.dtype)
    expected = x.double() @ w.double().T + b
    reference = (x.float() @ w.float().T + b).to(x.dtype)
    terms = (x.double().square() @ w.double().square().T).sqrt()
    (actual,) = linear(x, [matrix_of(weight)], [b])
    assert_sums("products of nf4", actual, expected, reference, terms)


@at_levels(0)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_the_numbers(use: Use, level: str, dtype: torch.dtype) -> None:
    """With whole matrices, and with rows and columns of them, which begin within the blocks of a largest scale."""
    use(level)
    generator = torch.Generator().manual_seed(1)
    for rows, outputs, inputs in SIZES:
        weight = drawn(outputs, inputs, rows)
        x, b = (
            torch.randn(rows, inputs, generator=generator).to(dtype),
            torch.randn(outputs, generator=generator),
        )
        check_products(x, weight, b)
        check_products(x, weight.part(0, range(outputs // 3, outputs)), b[outputs // 3 :])
        begin = inputs // 128 * 64
        check_products(x[:, begin:], weight.part(1, range(begin, inputs)), b)


@at_levels(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 64])
def test_weights_are_the_dequantized_ones_to_the_bit(
    use: Use, level: str, dtype: torch.dtype, rows: int
) -> None:
    """Rows of the identity give the weights of a matrix and of its parts; a bias cancels a column before rounding."""
    use(level)
    full = drawn(90, 320)
    for weight in (full, full.part(0, range(13, 90)), full.part(1, range(128, 320))):
        w, eye = weight.dequantize(dtype), torch.eye(weight.shape[1], dtype=dtype)
        actual = torch.cat([linear(chunk, [matrix_of(weight)])[0] for chunk in eye.split(rows)])
        assert torch.equal(actual, w.T)
        for index, column in enumerate(w.T.float()):
            (remainder,) = linear(eye[index].expand(rows, -1), [matrix_of(weight)], [-column])
            assert not remainder.any()


@at_levels(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_other_rows_nor_on_threads_nor_on_where_a_part_was_cut(
    use: Use, level: str, dtype: torch.dtype
) -> None:
    use(level)
    previous = torch.get_num_threads()

    @given(
        rows=st.integers(1, 40) | st.just(200),
        outputs=st.integers(1, 40),
        blocks=st.integers(1, 7),
        cut=st.integers(0, 39),
        threads=st.integers(1, 3),
        seed=st.integers(0, 1 << 20),
    )
    def check(rows: int, outputs: int, blocks: int, cut: int, threads: int, seed: int) -> None:
        torch.set_num_threads(threads)
        weight, generator = drawn(outputs, 64 * blocks, seed), torch.Generator().manual_seed(seed)
        x, plain = (torch.randn(n, 64 * blocks, generator=generator).to(dtype) for n in (rows, 5))
        product, plain_product = linear(x, [matrix_of(weight), plain])
        assert torch.equal(plain_product, linear(x, [plain])[0])
        row, first = seed % rows, cut % outputs
        assert torch.equal(linear(x[row : row + 1], [matrix_of(weight)])[0][0], product[row])
        part = weight.part(0, range(first, outputs))
        assert torch.equal(linear(x, [matrix_of(part)])[0], product[:, first:])

    try:
        check()
    finally:
        torch.set_num_threads(previous)


@at_levels(4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_of_decoding_are_those_of_the_modules(use: Use, level: str, dtype: torch.dtype) -> None:
    """Steps are equal also with an adapter, and with one that has magnitudes."""
    use(level)
    for lora in (None, Lora(rank=2, alpha=3.0), Lora(rank=2, alpha=3.0, magnitude=True)):
        decoder = model(**WIDE).to(dtype)
        quantize = kept_as("nf4")
        (quantize if lora is None else both(quantize, adapted(lora)))(decoder)
        for rows in (1, 9):
            steps(decoder, rows, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_multiplies_few_rows_by_the_kernels_which_read_what_it_keeps(dtype: torch.dtype) -> None:
    weight, x, b = drawn(30, 128), torch.randn(MOST_ROWS, 128).to(dtype), torch.randn(30)
    matrix = matrix_of(weight)
    assert torch.equal(weight.product(x, b), linear(x, [matrix], [b])[0])
    assert matrix.codes.data_ptr() == weight.codes.data_ptr()
    too_many = torch.cat((x, x[:1]))
    w = weight.dequantize(dtype)
    assert torch.equal(weight.product(too_many), torch.nn.functional.linear(too_many, w))


def test_rows_that_are_no_whole_blocks_have_a_reason_and_are_refused() -> None:
    ragged = Nf4.pack(torch.ones(2, 96))
    assert "a multiple of 64 inputs, got 96" in str(ragged.native())
    x = torch.ones(3, 96)
    assert torch.equal(ragged.product(x), torch.nn.functional.linear(x, ragged.dequantize()))
    with pytest.raises(BackendError, match="headway_linear failed"):
        linear(x, [matrix_of(drawn(2, 64))])
