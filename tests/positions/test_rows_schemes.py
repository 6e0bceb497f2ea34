"""Sinusoids, schemes by layer, rotated values, odd heads and prefixes (requirements 22, 69, 70, 76)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import RoFormerConfig
from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention

from headway.attention import attend
from headway.errors import ConfigError
from headway.models import ModelSpec, build
from headway.nn import Attention, RotaryEmbedding
from headway.positions import (
    DynamicNTK,
    LinearBias,
    LinearScaling,
    PerLayer,
    Relative,
    Rotary,
    Sinusoidal,
    SpecialOrthogonal,
    T5Bias,
)
from headway.tokens import Tokens
from tests.positions.small import EVERY, HEAD_DIM, HEADS, LENGTH, NONE, ROTARY, WIDTH, inputs, shifted, small

near = st.integers(-5000, 5000)

# -- row 22 ----------------------------------------------------------------------------------------------------


@given(
    p=st.integers(-5000, 5000) | st.integers(-(10**6), 10**6),
    k=st.integers(-5000, 5000),
    width=st.sampled_from([2, 10, 64]),
)
def test_row_22_sinusoids_are_the_formula_and_turn_with_distance(p, k, width):
    table = Sinusoidal().embedding(torch.tensor([p, p + k]), width, torch.float64)
    limit = 1e-12 if max(abs(p), abs(k)) <= 5000 else 1e-9
    for i in range(width // 2):
        angle = p / 10000 ** (2 * i / width)
        assert table[0, 2 * i : 2 * i + 2].tolist() == pytest.approx(
            [math.sin(angle), math.cos(angle)], abs=limit
        )
    swap = table[0].unflatten(-1, (-1, 2)).flip(-1).flatten()  # (cos, sin): shifted by k = rotated by -k
    moved = Rotary(pairing="adjacent").rotate(swap.view(1, 1, 1, -1), torch.tensor([k]))
    torch.testing.assert_close(
        moved.flatten().unflatten(-1, (-1, 2)).flip(-1).flatten(), table[1], rtol=0, atol=limit
    )


# -- row 69 ----------------------------------------------------------------------------------------------------


def test_row_69_each_layer_has_its_own_scheme():
    scheme = PerLayer((ROTARY, NONE, Rotary(500.0, pairing="halves")))
    assert [scheme.at(i) for i in (0, 1, 2, 3, 7)] == [*scheme.schemes, ROTARY, NONE]
    assert scheme.expand(6) == scheme.schemes * 2
    assert ROTARY.expand(3) == (ROTARY,) * 3
    assert ROTARY.at(5) is ROTARY
    assert PerLayer([ROTARY, NONE]) == PerLayer((ROTARY, NONE))
    assert hash(PerLayer((ROTARY,))) == hash(PerLayer((ROTARY,)))
    assert (scheme.marks, PerLayer((NONE,)).marks) == ("queries and keys", "nothing")
    assert PerLayer((T5Bias(), NONE)).marks == "scores"
    assert PerLayer((T5Bias(), LinearBias())).shared
    assert not PerLayer((T5Bias(), Relative(4))).shared
    assert PerLayer((NONE, Rotary(pairing="halves", scaling=DynamicNTK(2, 8)))).length_dependent
    assert not scheme.length_dependent


def test_row_69_rotary_in_the_first_layer_only():
    """The first layer equals that of a model with rotary everywhere, later ones those of a model without positions."""
    first, everywhere, nowhere = (small(s) for s in (EVERY["rotary in the first layer"], ROTARY, NONE))
    x, tokens = inputs(), Tokens.range(LENGTH)
    for model in (first, everywhere, nowhere):
        assert len(model.rotary) == 2
    for model in (everywhere, nowhere):
        model.load_state_dict(first.state_dict())
    everywhere.rotary[1], nowhere.rotary[0] = nowhere.rotary[1], everywhere.rotary[0]
    assert torch.equal(first(x, tokens), everywhere(x, tokens))
    assert torch.equal(first(x, tokens), nowhere(x, tokens))
    everywhere.rotary[1] = everywhere.rotary[0]
    assert not torch.allclose(first(x, tokens), everywhere(x, tokens), atol=1e-3)


# -- row 70 ----------------------------------------------------------------------------------------------------


def test_row_70_turned_values_are_those_of_transformers():
    config = RoFormerConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, rotary_value=True, attention_probs_dropout_prob=0.0
    )
    torch.manual_seed(2)
    theirs = RoFormerSelfAttention(config).double()
    x = inputs()
    angle = torch.arange(LENGTH)[:, None] * Rotary(pairing="adjacent").frequencies(HEAD_DIM)
    sines = torch.cat((angle.sin(), angle.cos()), -1)[None, None]
    expected = theirs(x, sinusoidal_pos=sines)[0]
    scheme = Rotary(pairing="adjacent", values=True)
    turn = RotaryEmbedding(scheme, HEAD_DIM)(Tokens.range(LENGTH), x.dtype)
    assert turn is not None
    assert turn.rotates_values
    parts = (theirs.query, theirs.key, theirs.value)
    q, k, v = (turn.apply(p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)) for p in parts)
    ours = attend(q, k, v, backend="dense").transpose(1, 2).flatten(2)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("by", [1, 1000])
def test_row_70_turned_values_break_shift_invariance(by):
    """With rotated values, outputs rotate with the shift: sum_j w_ij R_(j+s) v_j = R_s sum_j w_ij R_j v_j."""
    q, k, v = torch.randn(3, 1, 2, LENGTH, HEAD_DIM, dtype=torch.float64)

    def out(values: bool, by: int) -> Tensor:
        turn = RotaryEmbedding(Rotary(pairing="adjacent", values=values), HEAD_DIM)(shifted(by), q.dtype)
        return attend(
            turn.apply(q), turn.apply(k), turn.apply(v) if turn.rotates_values else v, backend="dense"
        )

    torch.testing.assert_close(out(False, by), out(False, 0), rtol=0, atol=1e-12)
    assert not torch.allclose(out(True, by), out(True, 0), atol=0.1)
    turned = ROTARY.rotate(out(True, 0), torch.full((LENGTH,), by))
    torch.testing.assert_close(out(True, by), turned, rtol=0, atol=1e-12)


def test_row_70_values_turn_under_a_scaling_without_amplitude():
    scheme = Rotary(pairing="halves", values=True, scaling=LinearScaling(2.0))
    assert scheme.rotation(torch.arange(3), 8).rotates_values
    assert scheme.with_pairing("halves") == scheme


# -- row 76 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [lambda d: RotaryEmbedding(ROTARY, d), lambda d: RotaryEmbedding(SpecialOrthogonal(ROTARY), d)]
)
def test_row_76_an_odd_head_is_refused(make):
    with pytest.raises(
        ConfigError, match=r"head_dim 7 is odd, and coordinates are rotated in pairs; .*dims=6"
    ):
        make(7)


@pytest.mark.parametrize("kind", [lambda r: r, SpecialOrthogonal])
def test_row_76_a_prefix_of_an_odd_head_may_turn(kind):
    x = torch.randn(1, 2, 5, 7, dtype=torch.float64)
    table = RotaryEmbedding(kind(Rotary(pairing="halves", dims=4)), 7)(Tokens.range(5), x.dtype)
    assert torch.equal(table.apply(x)[..., 4:], x[..., 4:])
    assert not torch.allclose(table.apply(x)[..., 1:, :4], x[..., 1:, :4])


def test_row_76_rotary_is_in_every_layer_of_a_decoder():
    model = build(
        ModelSpec.of("llama", vocab=17, width=WIDTH, layers=3, heads=HEADS, hidden=40), device="meta"
    )
    layers = [m for m in model.modules() if isinstance(m, Attention)]
    assert len(layers) == 3
    for layer in layers:
        assert layer.positions == Rotary(pairing="halves")
