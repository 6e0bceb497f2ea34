"""Rotations by pairs and by a trained SO(d) matrix: identities (requirements 40, 54-61, 63, 77)."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.positions import MatrixTable, Rotary, SpecialOrthogonal, to_pairing
from headway.positions.orthogonal import rotation_matrices
from headway_lab.explain.rotary_forms import (
    angles,
    complex_form,
    half_split_form,
    matrix_form,
    rotate_half_form,
    rotation_matrix,
    swapped_form,
)

DOUBLE = torch.float64
ADJACENT, HALVES = Rotary(pairing="adjacent"), Rotary(pairing="halves")
PAIRS = Rotary(pairing=((0, 3), (5, 1), (2, 4)), dims=6)
TURNS = [("adjacent", 6), ("halves", 2), ("halves", 8), (PAIRS.pairing, 6)]
near = st.integers(-5000, 5000)
seeds = st.integers(0, 2**31)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def skew(seed: int, dims: int, size: float = 1.0) -> Tensor:
    x = random(seed, dims, dims) * size
    return x - x.T


def offset_to(start: Rotary, generator: Tensor) -> Tensor:
    """Returns the trained offset (entries below the diagonal) with which the scheme's generator is `generator`."""
    change = generator - SpecialOrthogonal(start).generator(len(generator))
    return change[*torch.tril_indices(*generator.shape, -1)]


def at(table: MatrixTable, x: Tensor) -> Tensor:
    return table.apply(x.expand(1, 1, table.matrix.shape[-3], -1))[0, 0]


# -- rotary ----------------------------------------------------------------------------------------------------


def test_row_40_a_longer_table_begins_with_the_shorter_one():
    """Tables of 2048 and of 3000 positions agree in every bit, also in half precision."""
    x = random(0, 1, 2, 3000, 64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        short = HALVES.rotate(x[:, :, :2048].to(dtype), torch.arange(2048))
        assert torch.equal(HALVES.rotate(x.to(dtype), torch.arange(3000))[:, :, :2048], short)
    assert HALVES.rotation(torch.arange(4), 64, dtype=torch.float16).cos.dtype == torch.float32


def test_row_40_each_row_of_position_ids_is_looked_up_for_itself():
    whole = HALVES.rotation(torch.arange(3000), 64)
    ids = torch.randint(0, 3000, (3, 17), generator=torch.Generator().manual_seed(0))
    rows = HALVES.rotation(ids, 64)
    assert torch.equal(rows.cos, whole.cos[ids])
    assert torch.equal(rows.sin, whole.sin[ids])


@given(m=near, theta=st.floats(-4, 4), seed=seeds)
def test_row_54_a_complex_product_is_a_rotation_matrix(m, theta, seed):
    """f(q, m) = q e^(i m theta), and f(q, 0) = q."""
    rotary = Rotary(pairing="adjacent", schedule=(theta,))
    q = random(seed, 2)
    turned = rotary.rotate(q.view(1, 1, 1, 2), torch.tensor([m])).flatten()
    number = complex(q[0], q[1]) * complex(math.cos(m * theta), math.sin(m * theta))
    cos, sin = math.cos(m * theta), math.sin(m * theta)
    matrix = torch.tensor([[cos, -sin], [sin, cos]], dtype=DOUBLE)
    torch.testing.assert_close(
        turned, torch.tensor([number.real, number.imag], dtype=DOUBLE), rtol=0, atol=1e-13
    )
    torch.testing.assert_close(turned, matrix @ q, rtol=0, atol=1e-13)
    assert torch.equal(rotary.rotate(q.view(1, 1, 1, 2), torch.tensor([0])).flatten(), q)


@pytest.mark.parametrize("dims", [2, 6, 64])
def test_row_55_five_printed_forms_are_one(dims):
    x, position = random(1, 2, 3, 9, dims), torch.tensor([0, 1, 2, -5, 17, 100, 257, 2047, 4096])
    halves = to_pairing(x, heads=1, head_dim=dims, frm="adjacent", to="halves", dim=-1)
    neighbours = [form(x, position) for form in (complex_form, matrix_form, swapped_form)]
    split = [form(halves, position) for form in (half_split_form, rotate_half_form)]
    back = [to_pairing(y, heads=1, head_dim=dims, frm="halves", to="adjacent", dim=-1) for y in split]
    ours = ADJACENT.rotate(x, position)
    for form in (*neighbours, *back):
        torch.testing.assert_close(form, ours, rtol=0, atol=1e-12)
    torch.testing.assert_close(HALVES.rotate(halves, position), split[1], rtol=0, atol=1e-12)
    wrong = (rotate_half_form(x, position) - ours).abs().max()
    assert wrong > 0.1 if dims > 2 else wrong < 1e-12  # with two coordinates there is only one pairing


def test_row_55_the_dense_matrix_is_nearly_all_zeros():
    """Only 2 d of its d^2 numbers are not 0, and `Rotary` multiplies only by those."""
    for dims in (4, 64, 128):
        assert int(rotation_matrix(7, dims).count_nonzero()) == 2 * dims


def test_row_56_the_derivation_is_seen_in_numbers():
    """Checks |f(q, m)| = |q|, and that the angle phi(m) grows by the same theta at each step."""
    rotary = Rotary(pairing="adjacent", schedule=(0.3,))
    q = random(2, 2)
    steps = torch.arange(200)
    turned = torch.view_as_complex(rotary.rotate(q.expand(1, 1, 200, 2), steps)[0, 0].contiguous())
    torch.testing.assert_close(turned.abs(), q.norm().expand(200), rtol=1e-14, atol=0)
    phi = (turned / turned[0]).angle()
    growth = phi.diff().remainder(2 * math.pi)
    torch.testing.assert_close(growth, torch.full((199,), 0.3, dtype=DOUBLE), rtol=0, atol=1e-13)


@given(
    m=near, n=near, far=st.integers(-(10**6), 10**6), seed=seeds,
    theta=st.sampled_from([10.0, 10000.0, 1e6]), turns=st.sampled_from(TURNS),
)  # fmt: skip
def test_row_57_scores_know_the_difference_alone(m, n, far, seed, theta, turns):
    """Checks (R_m q) . (R_n k) = q . (R_(n-m) k), by `Rotary` and by rotation matrices."""
    pairing, dims = turns
    rotary = Rotary(theta, pairing=pairing, dims=dims)
    q, k = random(seed, 2, 1, 1, 1, 8)
    alone = (q * rotary.rotate(k, torch.tensor([n - m]))).sum()
    for shift, limit in ((0, 1e-10), (far, 1e-8)):
        left = (
            rotary.rotate(q, torch.tensor([m + shift])) * rotary.rotate(k, torch.tensor([n + shift]))
        ).sum()
        torch.testing.assert_close(left, alone, rtol=0, atol=limit)
    product = rotation_matrix(m, dims, theta).T @ rotation_matrix(n, dims, theta)
    torch.testing.assert_close(product, rotation_matrix(n - m, dims, theta), rtol=0, atol=1e-11)


@given(m=st.integers(-(2**40), 2**40), seed=seeds)
def test_row_58_turns_keep_norms_and_angles(m, seed):
    q, k = random(seed, 2, 1, 1, 1, 32)
    p = torch.tensor([m])
    for rotary in (ADJACENT, HALVES, PAIRS):
        assert torch.equal(rotary.rotate(q, torch.tensor([0])), q)
        turned = rotary.rotate(q, p)
        torch.testing.assert_close(turned.norm(), q.norm(), rtol=1e-14, atol=0)
        torch.testing.assert_close((turned * rotary.rotate(k, p)).sum(), (q * k).sum(), rtol=0, atol=1e-13)
    matrix = rotation_matrix(m, 32)
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(32, dtype=DOUBLE), rtol=0, atol=1e-14)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_row_59_frequencies_counted_from_0_or_from_1_are_the_same(theta):
    d = 64
    from_0 = torch.tensor([theta ** (-2 * i / d) for i in range(d // 2)], dtype=DOUBLE)
    from_1 = torch.tensor([theta ** (-2 * (i - 1) / d) for i in range(1, d // 2 + 1)], dtype=DOUBLE)
    actual = Rotary(theta, pairing="halves").frequencies(d)
    assert torch.equal(from_0, from_1)
    torch.testing.assert_close(actual, from_0, rtol=1e-15, atol=0)


def test_row_60_one_complex_number_a_pair_and_any_origin():
    q, k = random(3, 2, 1, 2, 11, 16)
    angle = angles(torch.arange(11), 16)
    assert angle.shape == (11, 8)
    product = torch.view_as_complex(q.unflatten(-1, (8, 2))) * torch.polar(torch.ones_like(angle), angle)
    turned = ADJACENT.rotate(q, torch.arange(11))
    torch.testing.assert_close(turned, torch.view_as_real(product).flatten(-2), rtol=0, atol=1e-14)
    from_0, from_1 = (
        ADJACENT.rotate(q, p) @ ADJACENT.rotate(k, p).mT for p in (torch.arange(11), torch.arange(1, 12))
    )
    torch.testing.assert_close(from_0, from_1, rtol=0, atol=1e-13)


# -- SO(d) -----------------------------------------------------------------------------------------------------


@given(m=near, n=near, seed=seeds)
def test_row_63_powers_of_any_rotation_know_the_difference_alone(m, n, seed):
    """Checks R_m^T R_n = R_(n-m), R_m^T R_m = I and R_0 = I, for a random generator A."""
    r_m, r_n, moved, zero = rotation_matrices(skew(seed, 6), torch.tensor([m, n, n - m, 0]))
    limit = 1e-11  # about |A| m 2^-52, with |A| up to ten
    torch.testing.assert_close(r_m.T @ r_n, moved, rtol=0, atol=limit)
    torch.testing.assert_close(r_m.T @ r_m, torch.eye(6, dtype=DOUBLE), rtol=0, atol=1e-14)
    assert torch.equal(zero, torch.eye(6, dtype=DOUBLE))
    assert torch.linalg.det(r_m) == pytest.approx(1.0, abs=1e-13)


def test_row_63_is_the_matrix_exponential():
    generator = skew(0, 8, 0.3)
    position = torch.tensor([[0, 1, 63, 64], [65, -1, -64, 500]])
    expected = torch.stack([torch.linalg.matrix_exp(p * generator) for p in position.flatten().tolist()])
    torch.testing.assert_close(
        rotation_matrices(generator, position), expected.view(2, 4, 8, 8), rtol=0, atol=2e-13
    )


@pytest.mark.parametrize(
    "start",
    [
        HALVES,
        ADJACENT,
        Rotary(pairing="halves", dims=10, schedule="cosine"),
        replace(PAIRS, values=True),
    ],
)
def test_row_63_starts_as_rotary_and_stays_exact_far_away(start):
    scheme, x = SpecialOrthogonal(start), random(4, 1, 1, 1, 16)
    position = torch.tensor([0, 1, 5, 64, 4097, -70_001, 1_000_003, 2**32 + 7])
    table = scheme.rotation(position, 16, DOUBLE)
    expected = start.rotate(x.expand(1, 1, 8, 16), position)[0, 0]
    error = (at(table, x) - expected).abs().amax(-1)
    assert (error <= 1e-14 + 8 * position.abs() * 2**-52).all()
    assert table.rotates_values == start.values
    norms = rotation_matrices(skew(5, 16), torch.tensor([2**40 + 12345])) @ x.view(16, 1)
    torch.testing.assert_close(norms.norm(), x.norm(), rtol=1e-14, atol=0)


def test_row_63_is_a_rotary_after_another_projection():
    """With A = Q F Q^T, and W_q and W_k multiplied by Q^T, the scores are those of `Rotary`."""
    generator = skew(6, 6)
    value, vector = torch.linalg.eigh(1j * generator)
    upper = vector[:, value > 0]
    basis = torch.stack((upper.real, upper.imag), -1).flatten(1) * math.sqrt(2)
    torch.testing.assert_close(basis.T @ basis, torch.eye(6, dtype=DOUBLE), rtol=0, atol=1e-13)
    rotary = Rotary(pairing="adjacent", schedule=tuple(value[value > 0].tolist()))
    q, k = random(7, 2, 1, 1, 9, 6)
    p = torch.arange(9)
    table = SpecialOrthogonal(ADJACENT).rotation(p, 6, DOUBLE, offset=offset_to(ADJACENT, generator))
    ours = table.apply(q) @ table.apply(k).mT
    torch.testing.assert_close(
        rotary.rotate(q @ basis, p) @ rotary.rotate(k @ basis, p).mT, ours, rtol=0, atol=1e-12
    )


def test_row_63_table_of_half_precision_is_float32_rounded_once():
    scheme = SpecialOrthogonal(Rotary(pairing="halves", dims=6))
    table = scheme.rotation(torch.arange(5), 8)
    x = random(8, 2, 3, 5, 8).bfloat16()
    assert table.matrix.dtype == torch.float32
    assert torch.equal(table.apply(x), table.apply(x.float()).bfloat16())
    assert torch.equal(table.apply(x)[..., 6:], x[..., 6:])


# -- other extensions ---------------------------------------------------------------------------------------------


@given(seed=seeds, dy=st.integers(-50, 50), dx=st.integers(-50, 50))
def test_row_77_two_rotaries_on_halves_of_a_head_know_both_differences(seed, dy, dx):
    """RoPE-2D: rows rotate the first half of a head, columns the second; scores depend on (dy, dx) only."""

    def turned(x: Tensor, row: int, column: int) -> Tensor:
        parts = zip(x.view(1, 1, 1, 16).chunk(2, -1), (row, column), strict=True)
        return torch.cat([HALVES.rotate(part, torch.tensor([p])) for part, p in parts], -1).flatten()

    q, k = random(seed, 2, 16)
    near = turned(q, 0, 0) @ turned(k, dy, dx)
    torch.testing.assert_close(turned(q, 30, 4) @ turned(k, 30 + dy, 4 + dx), near, rtol=0, atol=1e-12)


@given(seed=seeds)
def test_row_77_collinear_queries_and_keys_score_highest_at_distance_0(seed):
    """CoCA: if each pair of k is t_i >= 0 times that of q, then score(m) = sum_i |q_i|^2 t_i cos(m theta_i)."""
    q, t = random(seed, 16), random(seed + 1, 8).relu()
    k = q * t.repeat_interleave(2)
    far = ADJACENT.rotate(k.expand(1, 1, 257, 16), torch.arange(257))[0, 0] @ q
    assert (far <= far[0] + 1e-12).all()
