"""Positions that are added to embeddings (row 22), and the decay of rotary products (rows 65-68)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.positions import Learned, NoPositions, Rotary, Sinusoidal
from headway_lab.explain.rotary_decay import bound, decay

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
    """|sum_i q_i k_i^* e^(i m theta_i)| for q, k [..., d] in neighbour pairs: what `bound` bounds."""
    angle = distance.double()[..., None] * frequencies.double()
    q, k = (torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
    return (q * k.conj() * torch.polar(torch.ones_like(angle), angle)).sum(-1).abs()


def test_sinusoidal_is_the_printed_formula():
    width = 10
    table = Sinusoidal().embedding(torch.tensor([[0, 3, 5000]]), width, torch.float64)
    assert table.shape == (1, 3, width)
    for column, p in enumerate((0, 3, 5000)):
        for i in range(width // 2):
            angle = p / 10000 ** (2 * i / width)
            assert table[0, column, 2 * i] == pytest.approx(math.sin(angle), abs=1e-12)
            assert table[0, column, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-12)
    assert Sinusoidal().embedding(torch.arange(3), 4).dtype == torch.float32


def test_sinusoids_of_half_precision_are_rounded_once_at_any_position():
    """Far beyond what was trained and before 0: in bfloat16 itself 257 would be 256."""
    at = torch.tensor([257, 4099, 1_000_003, -5])
    exact = Sinusoidal().embedding(at, 16, torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(Sinusoidal().embedding(at, 16, dtype), exact.to(dtype))


def test_sinusoids_in_halves_are_the_same_numbers_with_all_sines_first():
    at = torch.tensor([0, 3, 5000])
    adjacent = Sinusoidal().embedding(at, 10, torch.float64)
    halves = Sinusoidal(pairing="halves").embedding(at, 10, torch.float64)
    assert torch.equal(halves, torch.cat((adjacent[:, 0::2], adjacent[:, 1::2]), -1))
    assert Sinusoidal(pairing="halves") != Sinusoidal()


@pytest.mark.parametrize("shift", [1, 7, 1000])
def test_sinusoidal_row_is_a_linear_map_of_an_earlier_row(shift):
    """One map for all positions: each (sin, cos) pair turned by the angle of `shift`."""
    rows, moved = (Sinusoidal().embedding(torch.arange(200) + k, 16, torch.float64) for k in (0, shift))
    angle = shift * 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    blocks = torch.stack((angle.cos(), angle.sin(), -angle.sin(), angle.cos()), -1).unflatten(-1, (2, 2))
    torch.testing.assert_close(rows @ torch.block_diag(*blocks).T, moved, rtol=0, atol=1e-12)


def test_learned_reads_row_position_plus_offset():
    learned = Learned(512, offset=2)
    assert learned.rows == 514
    assert learned.row(torch.tensor([[0, 511]])).tolist() == [[2, 513]]
    assert learned.row(torch.zeros(0, dtype=torch.long)).shape == (0,)
    for bad in (-1, 512):
        with pytest.raises(ConfigError, match=r"do not fit a table for positions 0..511"):
            learned.row(torch.tensor([3, bad]))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Learned(0), r"size must be >= 1 and offset >= 0, got 0 and 0"),
        (lambda: Learned(8, -1), r"got 8 and -1"),
        (lambda: Sinusoidal(pairing="half"), r"Sinusoidal: there is no pairing 'half' .*adjacent, halves"),
        (lambda: Sinusoidal(0), r"theta must be a finite number >= 1, got 0"),
        (lambda: Sinusoidal().embedding(torch.arange(3), 5), r"width must be even .* got 5"),
        (lambda: Sinusoidal().embedding(torch.arange(3).half(), 4), r"got torch.float16"),
        (lambda: Sinusoidal().embedding(torch.arange(3).bfloat16(), 4), r"got torch.bfloat16"),
        (lambda: Learned(8).row(torch.arange(3).half()), r"positions must be integers, got torch.float16"),
        (lambda: Learned(8).row(torch.arange(3).bfloat16()), r"got torch.bfloat16"),
        (lambda: Learned(8).row(torch.arange(3).float()), r"got torch.float32"),
        (lambda: Learned(8).row(torch.ones(3, dtype=torch.bool)), r"got torch.bool"),
    ],
)
def test_what_cannot_be_is_refused(make, text):
    with pytest.raises(ConfigError, match=text):
        make()


def test_schemes_are_values():
    schemes = {NoPositions(), NoPositions(), Sinusoidal(), Sinusoidal(10000), Learned(8), Learned(8, 2)}
    assert len(schemes) == 4
    assert repr(Learned(8)) == "Learned(size=8, offset=0)"
    assert Sinusoidal.marks == Learned.marks == "embeddings"


def test_decay_has_the_golden_values():
    frequencies = Rotary(pairing="adjacent").frequencies(128)
    distance = torch.tensor(list(GOLDEN))
    for found, expected in zip(decay(distance, frequencies).tolist(), GOLDEN.values(), strict=True):
        assert found == pytest.approx(expected, abs=5e-7)


def test_decay_is_a_trend_with_bumps():
    """E4, row 67: far tokens are not always weaker."""
    curve = decay(torch.arange(257), Rotary(pairing="adjacent").frequencies(128))
    assert int((curve.diff() > 0).sum()) == 115
    assert int(curve.argmin()) == 236


def test_equal_frequencies_do_not_decay():
    equal = torch.ones(64, dtype=torch.float64)
    flat = torch.full((257,), 32.5, dtype=torch.float64)
    torch.testing.assert_close(decay(torch.arange(257), equal), flat, rtol=1e-12, atol=0)
    i = torch.arange(64, dtype=torch.float64)
    assert decay(torch.tensor(256), 1 - i / 64).item() == pytest.approx(0.70, abs=0.005)


@given(seed=st.integers(0, 2**31), pairs=st.integers(1, 32))
def test_abel_bound_holds(seed, pairs):
    """Row 66: 50 x 64 random q, k, each at 257 distances."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 64, 1, 2 * pairs, dtype=torch.float64, generator=generator)
    frequencies, distance = Rotary(pairing="adjacent").frequencies(2 * pairs), torch.arange(257)
    limit = bound(q, k, distance, frequencies)
    assert (product(q, k, distance, frequencies) <= limit * (1 + 1e-12)).all()


def test_product_is_the_rotated_score_without_its_sign():
    """|Re| of the complex sum is |score|; the sum's modulus bounds it."""
    q, k = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rotary = Rotary(pairing="adjacent")
    turned = rotary.rotate(q.view(1, 1, 1, 8), torch.tensor([9])).flatten()
    assert (turned @ k).abs() <= product(q, k, torch.tensor(9), rotary.frequencies(8)) + 1e-12
