"""A rotated denominator can be 0, so that results blow up; the other two variants are safe (requirements 79 to 81)."""

import random

import pytest
import torch
from torch import Tensor

from headway.attention.linear_attention import (
    FORMS,
    LinearAttentionSpec,
    linear_attend,
    linear_weights,
)
from headway.patterns import Causal, Full, Pattern
from headway.positions import Rotary
from tests.linear_attention.oracle import table, tensors
from tests.linear_attention.test_forms import N

BOTH, NUMERATOR, COSINE = (
    LinearAttentionSpec(rotary="both"),
    LinearAttentionSpec(),
    LinearAttentionSpec("cosine"),
)
D = 64


def pairs(count: int, farthest: int = 2048, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries and keys from N(0, 1), [count, D], and distances from 1 to `farthest`."""
    noise = random.Random(seed)
    drawn = [
        (
            [noise.gauss(0, 1) for _ in range(D)],
            [noise.gauss(0, 1) for _ in range(D)],
            noise.randint(1, farthest),
        )
        for _ in range(count)
    ]
    q, k, distances = (torch.tensor(x, dtype=torch.float64) for x in zip(*drawn, strict=True))
    return q, k, distances.long()


def products(q: Tensor, k: Tensor, distances: Tensor) -> Tensor:
    """Returns (R_m phi(q)) . phi(k) of each pair, with phi = elu + 1."""
    phi_q, phi_k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    turned = Rotary(pairing="adjacent").rotate(phi_q[None, None], distances)[0, 0]
    return (turned * phi_k).sum(-1)


def test_row_79_some_random_pairs_have_a_negative_product() -> None:
    """With distances up to 2048; unrotated products are positive. Nearer pairs rotate less, and fewer are negative."""
    assert int((products(*pairs(300)) < 0).sum()) == 37
    q, k, distances = pairs(300)
    assert products(q, k, distances * 0).min() > 0
    assert (products(*pairs(300, farthest=64)) < 0).sum() < 5


def breaking() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns q, k, v [1, 1, 2, D] and positions [2] where the second query's rotated denominator is 0 to rounding.

    The second query is found by bisection between a query with a positive denominator and one with a negative one."""
    q, k, distances = pairs(300)
    worst = int(products(q, k, distances).argmin())
    at = torch.tensor([0, int(distances[worst])])
    keys = torch.stack((k[worst], torch.full((D,), -4.0, dtype=torch.float64)))[None, None]

    def denominator(x: Tensor) -> float:
        rotation = Rotary(pairing="adjacent")
        phi_q = rotation.rotate((torch.nn.functional.elu(x) + 1)[None, None, None], at[1:])
        phi_k = rotation.rotate(torch.nn.functional.elu(keys) + 1, at)
        return float((phi_q * phi_k).sum())

    low, high = q[worst], next(x for x in q if denominator(x) > 0)
    assert denominator(low) < 0 < denominator(high)
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if denominator(middle) < 0 else (low, middle)
    queries = torch.stack((torch.zeros(D, dtype=torch.float64), low))[None, None]
    v = torch.tensor([1.0, -1.0], dtype=torch.float64)[None, None, :, None]
    return queries, keys, v, at


def test_row_79_the_result_blows_up_and_row_80_row_81_stay_finite_there() -> None:
    q, k, v, at = breaking()
    rotation = table(at, D)
    for form in FORMS:
        out = {
            linear: linear_attend(q, k, v, linear, Causal(), rotation=rotation, form=form)
            for linear in (BOTH, NUMERATOR, COSINE)
        }
        assert out[BOTH].abs().max() > 1e6, "a mean of 1 and -1"
        assert out[NUMERATOR].abs().max() < 10
        assert out[COSINE].abs().max() <= 1
    assert not BOTH.is_safe
    assert NUMERATOR.is_safe
    assert COSINE.is_safe


def test_row_79_weights_of_the_turned_denominator_are_no_distribution() -> None:
    """They sum to 1 up to their rounding, but some are negative, and near a denominator of 0 they are huge."""
    q, k, _ = tensors(12, 40, d=8)
    weights = linear_weights(q, k, BOTH, rotation=table(torch.arange(40) * 1000, 8))
    assert weights.min() < 0
    assert ((weights.sum(-1) - 1).abs() < 1e-12 * weights.abs().sum(-1)).all()
    q, k, _, at = breaking()
    weights = linear_weights(q, k, BOTH, Causal(), rotation=table(at, D))
    assert torch.isfinite(weights).all()
    assert weights.min() < -1e6


def test_row_80_gradients_are_finite_where_row_79_breaks() -> None:
    q, k, v, at = breaking()
    sizes = {}
    for linear in (BOTH, NUMERATOR):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        linear_attend(*leaves, linear, Causal(), rotation=table(at, D), form="chunked").sum().backward()  # type: ignore[arg-type]
        sizes[linear] = max(float(t.grad.abs().max()) for t in leaves if t.grad is not None)
    assert sizes[BOTH] > 1e6
    assert sizes[NUMERATOR] < 100


def test_row_80_weights_may_be_negative_and_need_not_sum_to_1() -> None:
    q, k, _ = tensors(12, 40, d=8)
    far = table(torch.arange(40) * 1000, 8)
    weights = linear_weights(q, k, LinearAttentionSpec("relu"), rotation=far)
    assert weights.min() < -0.01
    assert (weights.sum(-1) - 1).abs().max() > 0.1
    assert not LinearAttentionSpec("relu").is_distribution


@pytest.mark.parametrize("form", ["parallel", "chunked"])
@pytest.mark.parametrize("linear", [LinearAttentionSpec(), LinearAttentionSpec("cosine")], ids=str)
def test_row_80_row_81_a_shift_of_all_positions_changes_nothing(
    linear: LinearAttentionSpec, form: str
) -> None:
    q, k, v = tensors(13, N)
    plain, shifted, stretched = (
        linear_attend(q, k, v, linear, Causal(), rotation=table(at, 6), form=form)
        for at in (torch.arange(N), torch.arange(N) + 12345, torch.arange(N) * 2)
    )
    assert torch.allclose(plain, shifted, rtol=0, atol=1e-10)
    assert not torch.allclose(plain, stretched, rtol=0, atol=1e-3), "distances matter"


@pytest.mark.parametrize("pattern", [Causal(), Full()], ids=str)
def test_row_81_the_cosine_kind_stays_a_distribution_under_rotation(pattern: Pattern) -> None:
    linear = LinearAttentionSpec("cosine")
    assert linear.is_distribution
    q, k, _ = tensors(14, 40, d=8)
    weights = linear_weights(q, k, linear, pattern, rotation=table(torch.arange(40) * 1000, 8))
    assert weights.min() >= 0
    assert torch.allclose(weights.sum(-1), torch.ones(2, 4, 40, dtype=torch.float64))
    unrotated = linear_weights(q, k, linear, pattern)
    assert not torch.allclose(weights, unrotated, atol=1e-3), "and positions matter"


def test_row_81_a_zero_vector_has_no_direction() -> None:
    q, k, _ = tensors(15, N)
    weights = linear_weights(q * 0, k, LinearAttentionSpec("cosine"))
    assert torch.allclose(weights, torch.full_like(weights, 1 / N))
