"""Positions added to embeddings (requirement 22), and bounds of rotary products (requirements 65-68)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.positions import Learned, NoPositions, Rotary, Sinusoidal
from headway_lab.explain.rotary_decay import bound

GOLDEN = {
    0: 32.5,
    1: 31.538166,
    5: 20.845358,
    10: 17.954137,
    50: 12.629452,
    100: 10.227330,
    200: 7.244771,
    256: 6.543097,
}


def product(
    q: torch.Tensor, k: torch.Tensor, distance: torch.Tensor, frequencies: torch.Tensor
) -> torch.Tensor:
    """Returns |sum_i q_i k_i^* e^(i m theta_i)| for q, k [..., d] in adjacent pairs, which `bound` bounds."""
    angle = distance.double()[..., None] * frequencies.double()
    q, k = (torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
    return (q * k.conj() * torch.polar(torch.ones_like(angle), angle)).sum(-1).abs()


def test_sinusoids_of_half_precision_are_rounded_once_at_any_position():
    """Positions far beyond training and below 0; computed in bfloat16, position 257 would be 256."""
    at = torch.tensor([257, 4099, 1_000_003, -5])
    exact = Sinusoidal().embedding(at, 16, torch.float64)
    assert Sinusoidal().embedding(at, 16).dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(Sinusoidal().embedding(at, 16, dtype), exact.to(dtype))


def test_sinusoids_in_halves_are_the_same_numbers_with_all_sines_first():
    at = torch.tensor([0, 3, 5000])
    adjacent = Sinusoidal().embedding(at, 10, torch.float64)
    halves = Sinusoidal(pairing="halves").embedding(at, 10, torch.float64)
    assert torch.equal(halves, torch.cat((adjacent[:, 0::2], adjacent[:, 1::2]), -1))
    assert Sinusoidal(pairing="halves") != Sinusoidal()


def test_learned_reads_row_position_plus_offset():
    learned = Learned(512, offset=2)
    assert learned.rows == 514
    assert learned.row(torch.tensor([[0, 511]])).tolist() == [[2, 513]]
    assert learned.row(torch.zeros(0, dtype=torch.long)).shape == (0,)
    for bad in (-1, 512):
        with pytest.raises(ConfigError, match=r"do not fit a table for positions 0..511"):
            learned.row(torch.tensor([3, bad]))


def test_schemes_are_values():
    schemes = {NoPositions(), NoPositions(), Sinusoidal(), Sinusoidal(10000), Learned(8), Learned(8, 2)}
    assert len(schemes) == 4
    assert repr(Learned(8)) == "Learned(size=8, offset=0)"
    assert Sinusoidal.marks == Learned.marks == "embeddings"


@given(seed=st.integers(0, 2**31), pairs=st.integers(1, 32))
def test_abel_bound_holds(seed, pairs):
    """Requirement 66: 64 random q, k for each example, each at 257 distances."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 64, 1, 2 * pairs, dtype=torch.float64, generator=generator)
    frequencies, distance = Rotary(pairing="adjacent").frequencies(2 * pairs), torch.arange(257)
    limit = bound(q, k, distance, frequencies)
    assert (product(q, k, distance, frequencies) <= limit * (1 + 1e-12)).all()


def test_product_is_the_rotated_score_without_its_sign():
    """The score is the real part of the complex sum, so the sum's modulus bounds |score|."""
    q, k = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rotary = Rotary(pairing="adjacent")
    turned = rotary.rotate(q.view(1, 1, 1, 8), torch.tensor([9])).flatten()
    assert (turned @ k).abs() <= product(q, k, torch.tensor(9), rotary.frequencies(8)) + 1e-12
