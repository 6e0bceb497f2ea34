"""Conversion between pairings of rotary coordinates, and rotation matrices (requirements 55, 60, 61)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.positions import Rotary, coordinate_pairs, to_pairing
from headway_lab.explain import rotary_forms as f


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@st.composite
def pairings(draw, dims):
    kind = draw(st.sampled_from(["adjacent", "halves", "pairs"]))
    if kind != "pairs":
        return kind
    order = draw(st.permutations(range(dims)))
    return tuple(zip(order[0::2], order[1::2], strict=True))


def test_the_matrix_of_position_10_is_the_10th_power_of_that_of_1():
    power = torch.linalg.matrix_power(f.rotation_matrix(1, 8), 10)
    torch.testing.assert_close(power, f.rotation_matrix(10, 8), rtol=0, atol=1e-14)


@given(
    frm=pairings(8), to=pairings(8), heads=st.integers(1, 4), rest=st.integers(0, 3), seed=st.integers(0, 999)
)
def test_conversion_preserves_scores_and_returns_exactly(frm, to, heads, rest, seed):
    """Converted weights and biases, rotated in the new pairing, give the old scores, also if only a prefix of the head
    is rotated. Converting back restores every bit.
    """
    head_dim, width, tokens = 8 + rest, 5, 4
    kv = 1 if heads % 2 else 2
    x = random(seed, 1, tokens, width)
    weights = {
        h: (random(seed + 1, h * head_dim, width), random(seed + 2, h * head_dim)) for h in (heads, kv)
    }

    def scores(pairing, changed):
        rotary, rotated = Rotary(pairing=pairing, dims=8), []
        for h, parts in weights.items():
            w, b = parts
            if changed:
                w, b = (to_pairing(t, heads=h, head_dim=head_dim, dims=8, frm=frm, to=to) for t in parts)
            rotated.append(
                rotary.rotate(
                    (x @ w.T + b).unflatten(-1, (h, head_dim)).transpose(1, 2), torch.arange(tokens)
                )
            )
        q, k = rotated[0], rotated[-1]
        return (
            q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
            if q.shape[1] % k.shape[1] == 0
            else q @ q.mT
        )

    torch.testing.assert_close(scores(to, True), scores(frm, False), rtol=0, atol=1e-12)
    for h, parts in weights.items():
        for t in parts:
            converted = to_pairing(t, heads=h, head_dim=head_dim, dims=8, frm=frm, to=to)
            assert torch.equal(to_pairing(converted, heads=h, head_dim=head_dim, dims=8, frm=to, to=frm), t)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_adjacent_to_halves_is_the_permutation_of_metas_files(heads):
    """Equals the formula of the public conversion script, with the tensor's own number of heads (keys have fewer)."""
    head_dim, width = 6, 5
    w = random(4, heads * head_dim, width)
    expected = w.view(heads, head_dim // 2, 2, width).transpose(1, 2).reshape(heads * head_dim, width)
    assert torch.equal(to_pairing(w, heads=heads, head_dim=head_dim, frm="adjacent", to="halves"), expected)


def test_other_axes_and_norm_gains():
    w = random(5, 3, 2 * 8)
    turned = to_pairing(w, heads=2, head_dim=8, frm="halves", to="adjacent", dim=1)
    assert torch.equal(turned, to_pairing(w.T, heads=2, head_dim=8, frm="halves", to="adjacent").T)
    gain = torch.arange(8.0)
    moved = to_pairing(gain, heads=1, head_dim=8, frm="halves", to="adjacent")
    assert moved.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    partial = to_pairing(gain, heads=1, head_dim=8, dims=4, frm="halves", to="adjacent")
    assert partial.tolist() == [0, 2, 1, 3, 4, 5, 6, 7]


def test_pairs_by_name():
    assert coordinate_pairs("adjacent", 6) == ((0, 1), (2, 3), (4, 5))
    assert coordinate_pairs("halves", 6) == ((0, 3), (1, 4), (2, 5))
