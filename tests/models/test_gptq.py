"""GPTQ by blocks gives the codes of GPTQ column by column, and changes outputs less than rounding does."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.errors import ConfigError
from headway.models.gptq import gptq, inverse_factor
from headway.quantization import QuantizedMatrix, quantize_clipped, round_weights


def problem(outputs: int, inputs: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns weights [O, I] and H [I, I] of correlated inputs, in float64."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs, inputs, generator=generator, dtype=torch.float64) / inputs**0.5
    x = torch.randn(3 * inputs, inputs, generator=generator, dtype=torch.float64)
    x = (x @ mix + 0.3 * x) * torch.rand(inputs, generator=generator, dtype=torch.float64).exp()
    return torch.randn(outputs, inputs, generator=generator, dtype=torch.float64), x.T @ x


def naive(weight: Tensor, hessian: Tensor, bits: int, group: int) -> QuantizedMatrix:
    """Quantizes one input after the other; each changes all later ones at once, and H^-1 loses its row and column
    (Frantar et al. 2023, equations 2 and 3)."""
    w = weight.clone()
    h = hessian.clone()
    h.diagonal().add_(0.01 * h.diagonal().mean())
    inverse = torch.linalg.inv(h)
    scale = quantize_clipped(w, bits, group).scale
    codes = torch.empty(w.shape, dtype=torch.uint8)
    order = hessian.diagonal().argsort(descending=True).tolist()
    for i in order:
        column = round_weights(w[:, i : i + 1], scale[:, i // group, None], None, bits, 1)
        codes[:, i] = column.codes[:, 0]
        error = (w[:, i] - column.dequantize(torch.float64)[:, 0]) / inverse[i, i]
        w -= torch.outer(error, inverse[i])
        inverse -= torch.outer(inverse[:, i], inverse[i]) / inverse[i, i].clone()
    return QuantizedMatrix(codes, scale, None, bits, group)


@settings(max_examples=6)
@given(
    inputs=st.integers(1, 150),
    group=st.sampled_from([32, 64, 160]),
    bits=st.sampled_from([4, 8]),
    seed=st.integers(0, 9),
)
def test_blocks_give_the_codes_of_single_columns(inputs: int, group: int, bits: int, seed: int) -> None:
    w, h = problem(5, inputs, seed)
    actual, expected = gptq(w, h, bits, group), naive(w, h, bits, min(group, inputs))
    assert torch.equal(actual.scale, expected.scale)
    assert torch.equal(actual.codes, expected.codes)


def test_groups_that_are_longer_than_a_block() -> None:
    w, h = problem(3, 300, 0)
    actual, expected = gptq(w, h, 4, 192), naive(w, h, 4, 192)
    assert torch.equal(actual.codes, expected.codes)


def test_the_factor_is_that_of_the_damped_inverse() -> None:
    _, h = problem(1, 40, 0)
    h[7], h[:, 7] = 0, 0
    u = inverse_factor(h)
    assert torch.equal(u, u.triu())
    damped = h.clone()
    damped[7, 7] = 1
    damped.diagonal().add_(0.01 * damped.diagonal().mean())
    torch.testing.assert_close(u.T @ u @ damped, torch.eye(40, dtype=torch.float64))


@pytest.mark.parametrize("bits", [4, 8])
def test_outputs_change_less_than_by_rounding(bits: int) -> None:
    w, h = problem(32, 128, 1)

    def change(matrix: QuantizedMatrix) -> float:
        gap = matrix.dequantize(torch.float64) - w
        return float((gap @ h * gap).sum())

    assert change(gptq(w, h, bits, 32)) < 0.75 * change(quantize_clipped(w, bits, 32))


def test_inputs_that_are_no_numbers_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"gptq: inputs of a layer are not finite"):
        gptq(torch.ones(2, 3), torch.full((3, 3), torch.nan), 4)
