"""Rows 55, 60, 61: five forms of one rotation, and conversion between pairings."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.positions import Rotary, coordinate_pairs, to_pairing
from headway_lab.explain import rotary_forms as f

SHUFFLED = ((5, 0), (2, 7), (1, 4), (6, 3))


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@st.composite
def pairings(draw, dims):
    kind = draw(st.sampled_from(["adjacent", "halves", "pairs"]))
    if kind != "pairs":
        return kind
    order = draw(st.permutations(range(dims)))
    return tuple(zip(order[0::2], order[1::2], strict=True))


@pytest.mark.parametrize("d", [2, 8, 64])
def test_the_five_forms_agree_after_the_matching_permutation(d):
    x, position = random(0, 2, 3, 6, d), torch.tensor([0, 1, 2, 17, 2047, -5])
    halved = to_pairing(x, heads=1, head_dim=d, frm="adjacent", to="halves", dim=-1)
    outs = [form(x, position) for form in (f.complex_form, f.matrix_form, f.swapped_form)]
    for form in (f.half_split_form, f.rotate_half_form):
        outs.append(
            to_pairing(form(halved, position), heads=1, head_dim=d, frm="halves", to="adjacent", dim=-1)
        )
    outs.append(Rotary(pairing="adjacent").rotate(x, position))
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(
        Rotary(pairing="halves").rotate(halved, position),
        f.rotate_half_form(halved, position),
        rtol=0,
        atol=1e-12,
    )
    wrong = (f.rotate_half_form(x, position) - outs[0]).abs().max()
    assert wrong > 0.1 if d > 2 else wrong < 1e-12  # two coordinates can only be paired in one way


def test_matrices_multiply_as_positions_add():
    a, b = f.rotation_matrix(3, 8), f.rotation_matrix(10, 8)
    torch.testing.assert_close(a.T @ b, f.rotation_matrix(7, 8), rtol=0, atol=1e-14)
    torch.testing.assert_close(torch.linalg.matrix_power(f.rotation_matrix(1, 8), 10), b, rtol=0, atol=1e-14)


def test_forms_refuse_odd_dims():
    with pytest.raises(ConfigError, match=r"even .* got 7"):
        f.swapped_form(torch.zeros(2, 7), torch.arange(2))


@given(
    frm=pairings(8), to=pairings(8), heads=st.integers(1, 4), rest=st.integers(0, 3), seed=st.integers(0, 999)
)
def test_conversion_preserves_scores_and_returns_exactly(frm, to, heads, rest, seed):
    """q = W x with W converted, turned in the new pairing, gives the old scores: weights, biases and a
    prefix of D.
    """
    head_dim, width, tokens = 8 + rest, 5, 4
    kv = 1 if heads % 2 else 2
    x = random(seed, 1, tokens, width)
    weights = {
        h: (random(seed + 1, h * head_dim, width), random(seed + 2, h * head_dim)) for h in (heads, kv)
    }

    def scores(pairing, changed):
        rotary, made = Rotary(pairing=pairing, dims=8), []
        for h, parts in weights.items():
            w, b = parts
            if changed:
                w, b = (to_pairing(t, heads=h, head_dim=head_dim, dims=8, frm=frm, to=to) for t in parts)
            made.append(
                rotary.rotate(
                    (x @ w.T + b).unflatten(-1, (h, head_dim)).transpose(1, 2), torch.arange(tokens)
                )
            )
        q, k = made[0], made[-1]
        return (
            q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
            if q.shape[1] % k.shape[1] == 0
            else q @ q.mT
        )

    torch.testing.assert_close(scores(to, True), scores(frm, False), rtol=0, atol=1e-12)
    for h, parts in weights.items():
        for t in parts:
            there = to_pairing(t, heads=h, head_dim=head_dim, dims=8, frm=frm, to=to)
            assert torch.equal(to_pairing(there, heads=h, head_dim=head_dim, dims=8, frm=to, to=frm), t)


def test_round_trip_through_every_pairing_is_bit_exact():
    w = random(3, 3 * 8, 5).bfloat16()
    start = w
    for frm, to in (("adjacent", "halves"), ("halves", SHUFFLED), (SHUFFLED, "adjacent")):
        w = to_pairing(w, heads=3, head_dim=8, frm=frm, to=to)
        if to != "adjacent":
            assert not torch.equal(w, start)
    assert torch.equal(w, start)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_adjacent_to_halves_is_the_permutation_of_metas_files(heads):
    """The public conversion script's formula, with the head count of the tensor itself (keys have fewer)."""
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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"heads": 4, "head_dim": 8},
            r"axis 0 of shape \(16, 5\) must be heads \* head_dim = 4 \* 8 = 32 long",
        ),
        ({"heads": 2, "head_dim": 8, "dim": 2}, r"shape \(16, 5\) has no axis 2"),
        ({"heads": 2, "head_dim": 8, "dims": 10}, r"10 rotated dims do not fit a head of 8"),
        ({"heads": 2, "head_dim": 8, "dims": 3}, r"even .* got 3"),
        ({"heads": 2, "head_dim": 8, "to": ((0, 1),)}, r"lists 1 pairs, but 8 rotated dims are 4 pairs"),
        ({"heads": 2, "head_dim": 8, "to": "interleaved"}, r"there is no 'interleaved'"),
    ],
)
def test_what_does_not_fit_is_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        to_pairing(torch.zeros(16, 5), **{"frm": "halves", "to": "adjacent", **options})
