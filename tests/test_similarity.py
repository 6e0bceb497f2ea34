"""Dot product, L2 norm and cosine (requirement 18)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.similarity import cosine, dot, l2_norm, normalize

vectors = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=5, max_size=5)


@given(a=vectors, b=vectors)
def test_row_18_is_the_formula(a, b):
    x, y = torch.tensor([a, b], dtype=torch.float64)
    product, norms = sum(p * q for p, q in zip(a, b, strict=True)), math.hypot(*a) * math.hypot(*b)
    assert dot(x, y).item() == pytest.approx(product, rel=1e-14, abs=1e-11)
    assert l2_norm(x).item() == pytest.approx(math.hypot(*a), rel=1e-14)
    assert cosine(x, y).item() == pytest.approx(product / norms if norms else 0.0, rel=1e-12, abs=1e-12)
    assert normalize(x).norm().item() == pytest.approx(1.0 if any(a) else 0.0, rel=1e-14)


def test_row_18_cosine_is_that_of_torch_and_broadcasts():
    a, b = torch.randn(2, 4, 1, 7), torch.randn(3, 7)
    expected = torch.nn.functional.cosine_similarity(a, b, dim=-1)
    assert cosine(a, b).shape == dot(a, b).shape == (2, 4, 3)
    torch.testing.assert_close(cosine(a, b), expected)
    torch.testing.assert_close(dot(a, b), (a * b).sum(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_row_18_the_zero_vector_is_like_nothing_and_gives_no_gradient(dtype):
    zero, other = torch.zeros(2, 3, dtype=dtype, requires_grad=True), torch.ones(2, 3, dtype=dtype)
    for value in (cosine(zero, other), l2_norm(zero), normalize(zero), cosine(zero, zero)):
        assert value.dtype == dtype
        assert torch.equal(value, torch.zeros_like(value))
        (gradient,) = torch.autograd.grad(value.sum(), zero)
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1.0, 1e30, 3e38])
def test_row_18_squares_neither_vanish_nor_overflow(size):
    x = torch.tensor([3.0, -4.0]) / 5 * size
    torch.testing.assert_close(l2_norm(x) / size, torch.tensor(1.0), rtol=1e-4, atol=0)
    torch.testing.assert_close(normalize(x), torch.tensor([0.6, -0.8]), rtol=1e-4, atol=0)
    torch.testing.assert_close(cosine(x, -x), torch.tensor(-1.0), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_row_18_half_precision_is_float32_rounded_once(dtype):
    a, b = (torch.randn(9, 64).to(dtype) for _ in "ab")
    for f in (dot, cosine):
        assert torch.equal(f(a, b), f(a.float(), b.float()).to(dtype))
    for g in (l2_norm, normalize):
        assert torch.equal(g(a), g(a.float()).to(dtype))


def test_row_18_gradients():
    a, b = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in "ab")
    for f in (dot, cosine):
        assert torch.autograd.gradcheck(f, (a, b))
        assert torch.autograd.gradgradcheck(f, (a, b))
    for g in (l2_norm, normalize):
        assert torch.autograd.gradcheck(g, a)
        assert torch.autograd.gradgradcheck(g, a)
