"""Rotary embedding: identities, precision, shapes, refusals (requirements 40, 54, 57-60, 64, 72, 76)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.positions import DynamicNTK, LinearScaling, LongRope, NoPositions, Rotary, RotaryTable, YaRN

PAIRINGS = ["adjacent", "halves", ((0, 3), (5, 1), (2, 4))]
seeds = st.integers(0, 2**31)


def vectors(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def turned(rotary: Rotary, x: torch.Tensor, position: int) -> torch.Tensor:
    return rotary.rotate(x.view(1, 1, 1, -1), torch.tensor([position])).flatten()


@given(m=st.integers(0, 500), n=st.integers(0, 500), seed=seeds)
def test_expansion_of_one_pair_has_sine_of_m_minus_n(m, n, seed):
    """Slip E10: the document prints the expansion with sin(n - m); right is sin(m - n)."""
    q, k = vectors(seed, 2, 2)
    rotary = Rotary(pairing="adjacent")
    score = turned(rotary, q, m) @ turned(rotary, k, n)
    expansion = math.cos(m - n) * (q @ k) + math.sin(m - n) * (q[0] * k[1] - q[1] * k[0])
    torch.testing.assert_close(score, expansion, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_position_is_its_rows_own(pairing):
    """Requirement 40: position_ids [B, T] in any order and with gaps; no table limits positions."""
    rotary = Rotary(pairing=pairing)
    x = vectors(2, 2, 3, 4, 6)
    position = torch.tensor([[0, 1, 2, 3], [2999, 5, 5, 70000]])
    out = rotary.rotate(x, position)
    for b in range(2):
        for t in range(4):
            alone = rotary.rotate(x[b : b + 1, :, t : t + 1], position[b : b + 1, t : t + 1])
            torch.testing.assert_close(out[b : b + 1, :, t : t + 1], alone, rtol=0, atol=1e-15)
    same = rotary.rotate(x, position[:1])
    torch.testing.assert_close(same, rotary.rotate(x, position[0]), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pairing", PAIRINGS[:2])
def test_half_precision_is_float32_rounded_once(dtype, pairing):
    rotary = Rotary(pairing=pairing)
    x = vectors(3, 1, 2, 5, 64).to(dtype)
    position = torch.tensor([[0, 257, 4099, 32769, 131071]])
    out = rotary.rotate(x, position)
    assert out.dtype == dtype
    assert torch.equal(out, rotary.rotate(x.float(), position).to(dtype))


@pytest.mark.parametrize("pairing", PAIRINGS[:2])
def test_float32_keeps_float32_precision_at_any_position(pairing):
    """A table of float32 angles errs by about position * 2^-24; ours errs by a few units in the last place."""
    rotary = Rotary(pairing=pairing)
    x = vectors(4, 1, 1, 3, 64)
    position = torch.tensor([1_000_003, -77_777, 2**40 + 1])
    x = x.float()
    error = (rotary.rotate(x, position).double() - rotary.rotate(x.double(), position)).abs().max()
    assert error < 4 * 2**-24 * x.abs().max()


def test_shift_by_1000_changes_scores_by_rounding_only():
    """Requirement 64, in float32: the tolerance is the error of the two dot products themselves."""
    rotary = Rotary(pairing="halves")
    q, k = (x.float() for x in vectors(5, 2, 1, 1, 32, 64))
    at = torch.arange(32)
    scores, moved = (rotary.rotate(q, p) @ rotary.rotate(k, p).mT for p in (at, at + 1000))
    limit = 64 * 2**-24 * q.norm(dim=-1).max() * k.norm(dim=-1).max()
    assert (scores - moved).abs().max() < limit


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_gradients(pairing):
    x = vectors(6, 2, 2, 3, 6).requires_grad_()
    position = torch.tensor([[0, 4, 9], [1, 1, -3]])
    rotary = Rotary(pairing=pairing, scaling=YaRN(4.0, 32))
    assert torch.autograd.gradcheck(lambda x: rotary.rotate(x, position), x)
    assert torch.autograd.gradgradcheck(lambda x: rotary.rotate(x, position).square(), x)


@pytest.mark.parametrize("pairing", PAIRINGS[:2])
def test_gradients_of_half_precision_have_its_dtype(pairing):
    x = vectors(6, 1, 2, 3, 8).bfloat16().requires_grad_()
    grad = vectors(7, 1, 2, 3, 8).bfloat16()
    rotary = Rotary(pairing=pairing)
    rotary.rotate(x, torch.tensor([1, 5, 9])).backward(grad)
    assert torch.equal(x.grad, rotary.rotate(grad, -torch.tensor([1, 5, 9])))


@pytest.mark.parametrize("pairing", PAIRINGS[:2])
@pytest.mark.parametrize("head_dim", [7, 8])
def test_partial_rotary_leaves_the_rest_alone(pairing, head_dim):
    """Also for heads of odd width, and for strides that do not allow a complex view."""
    rotary = Rotary(pairing=pairing, dims=4)
    x = vectors(7, 2, 3, 5, head_dim)
    out = rotary.rotate(x, torch.arange(5))
    assert torch.equal(out[..., 4:], x[..., 4:])
    whole = Rotary(pairing=pairing).rotate(x[..., :4].contiguous(), torch.arange(5))
    torch.testing.assert_close(out[..., :4], whole, rtol=0, atol=2e-15)
    assert rotary.frequencies(head_dim).shape == (2,)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_layout_of_memory_does_not_matter(pairing):
    rotary = Rotary(pairing=pairing)
    x = vectors(8, 2, 5, 3, 6)
    out = rotary.rotate(x.transpose(1, 2), torch.arange(5))
    for same in (x.transpose(1, 2).contiguous(), torch.stack((x, x), -1)[..., 0].transpose(1, 2)):
        torch.testing.assert_close(rotary.rotate(same, torch.arange(5)), out, rtol=0, atol=2e-15)


def test_one_table_serves_many_tensors_and_empty_calls():
    rotary = Rotary(pairing="adjacent")
    table = rotary.rotation(torch.arange(4), 8, dtype=torch.float64)
    assert isinstance(table, RotaryTable)
    q = vectors(9, 2, 4, 4, 8)
    assert torch.equal(table.apply(q), rotary.rotate(q, torch.arange(4)))
    assert rotary.rotate(torch.zeros(2, 3, 0, 8), torch.zeros(2, 0, dtype=torch.long)).shape == (2, 3, 0, 8)


def test_is_a_value():
    a = Rotary(pairing="halves", scaling=LinearScaling(2))
    b = Rotary(10000, pairing="halves", scaling=LinearScaling(factor=2.0))
    assert a == b
    assert hash(a) == hash(b)
    assert a != a.with_pairing("adjacent")
    assert eval(repr(a)) == a
    assert Rotary(pairing=[[0, 2], [1, 3]]) == Rotary(pairing=((0, 2), (1, 3)))
    with pytest.raises(AttributeError):
        a.theta = 5.0  # type: ignore[misc]
    assert (a.marks, NoPositions().marks) == ("queries and keys", "nothing")
    assert a.amplitude == 1.0
    assert not a.length_dependent


SCALED = [DynamicNTK(4.0, 8), LongRope((1.0,) * 4, (2.0, 3.0, 4.0, 5.0), 8, factor=4.0)]


@pytest.mark.parametrize("scaling", SCALED)
@pytest.mark.parametrize("pairing", ["adjacent", "halves"])
def test_length_dependent_scalings_use_each_rows_own_length(scaling, pairing):
    """A row in a batch equals the row alone; a long row does not change a short one."""
    rotary = Rotary(pairing=pairing, scaling=scaling)
    assert rotary.length_dependent
    x = vectors(10, 2, 2, 20, 8)
    position = torch.arange(20).expand(2, 20)
    both = rotary.rotate(x, position, torch.tensor([20, 6]))
    for row, length in enumerate((20, 6)):
        alone = rotary.rotate(x[row : row + 1], position[:1], length)
        torch.testing.assert_close(both[row : row + 1], alone, rtol=0, atol=1e-15)
    plain = Rotary(pairing=pairing).rotate(x[1:], position[:1]) * scaling.amplitude
    torch.testing.assert_close(both[1:], plain, rtol=0, atol=1e-14)
    assert not torch.allclose(
        both[:1], Rotary(pairing=pairing).rotate(x[:1], position[:1]) * scaling.amplitude
    )
    assert rotary.frequencies(8, torch.tensor([20, 6])).shape == (2, 4)
    packed = rotary.rotate(x, position, torch.tensor([[20] * 20, [20] * 10 + [6] * 10]))
    assert torch.equal(packed[:1], both[:1])
    assert torch.equal(packed[1:, :, 10:], both[1:, :, 10:])
    assert not torch.equal(packed[1:, :, 1:10], both[1:, :, 1:10])
    with pytest.raises(ConfigError, match=r"depends on each row's length; give length"):
        rotary.rotate(x, position)
    with pytest.raises(ConfigError, match=r"of 3 rows do not fit a batch of 2"):
        rotary.rotate(x, torch.arange(20), torch.tensor([1, 2, 3]))


def test_amplitude_scales_the_turned_prefix_only():
    scaling = YaRN(4.0, 32, attention_factor=1.5)
    x = vectors(11, 1, 1, 1, 8)
    out = Rotary(pairing="halves", dims=4, scaling=scaling).rotate(x, torch.tensor([0]))
    assert torch.equal(out[..., :4], x[..., :4] * 1.5)
    assert torch.equal(out[..., 4:], x[..., 4:])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("scaling", [None, *SCALED[:1]])
def test_traces_as_one_graph(pairing, scaling):
    x, position = vectors(13, 2, 2, 5, 6), torch.tensor([[0, 1, 2, 3, 4], [9, 8, 7, 6, 5]])
    rotary = Rotary(pairing=pairing, scaling=scaling)
    traced = torch.compile(rotary.rotate, backend="eager", fullgraph=True)
    length = torch.tensor([5, 20])
    torch.testing.assert_close(
        traced(x, position, length), rotary.rotate(x, position, length), rtol=0, atol=2e-15
    )
