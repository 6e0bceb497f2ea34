"""The gradient norm for clipping has the same bits however the gradients are sharded."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.train.trainer import PIECE, gradient_norm, row_squares


def gradients(seed: int, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return x * 10 ** torch.randn(rows, 1, generator=generator)


@given(st.integers(0, 99), st.integers(1, 40), st.integers(1, 300), st.integers(1, 8), st.booleans())
def test_squares_of_rows_are_those_of_any_part(
    seed: int, rows: int, columns: int, parts: int, vector: bool
) -> None:
    x = gradients(seed, rows, columns)
    x = x.flatten() if vector else x
    squares = torch.cat([row_squares(part) for part in x.chunk(parts)])
    assert torch.equal(squares, row_squares(x))


@pytest.mark.parametrize("columns", [PIECE, 3 * PIECE + 5, 40_000])
def test_squares_of_long_rows_are_those_of_any_part_on_any_number_of_threads(columns: int) -> None:
    x = gradients(0, 6, columns)
    expected, before = row_squares(x), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for parts in (1, 2, 6):
            assert torch.equal(torch.cat([row_squares(part) for part in x.chunk(parts)]), expected)
    finally:
        torch.set_num_threads(before)


def test_the_norm_is_exact_to_float64() -> None:
    xs = [gradients(0, 30, 50), gradients(1, 7, 1).flatten(), torch.tensor(3.0), torch.zeros(0, 4)]
    exact = sum(Fraction(value) ** 2 for x in xs for value in x.flatten().tolist())
    assert float(gradient_norm(xs)) == pytest.approx(math.sqrt(exact), rel=1e-14)
    assert math.isnan(gradient_norm([torch.tensor([1.0, math.nan])]))
    assert math.isinf(gradient_norm([torch.tensor([1.0, -math.inf])]))
