"""Position schemes compared in one small model (requirement 74)."""

import math

import pytest
import torch
from torch import nn
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from headway.attention import attend
from headway.checkpoints.hf.config import own_config, spec_from_own
from headway.models import ModelSpec
from headway.patterns import Causal
from headway.positions import LinearBias, PerLayer, Relative, Rotary, T5Bias
from headway.scores import ALiBi, RelativeBias, RelativeKey, alibi_slopes
from headway.tokens import Tokens
from tests.positions.small import (
    EVERY,
    HEAD_DIM,
    HEADS,
    LENGTH,
    NONE,
    ROTARY,
    WIDTH,
    Small,
    inputs,
    shifted,
    small,
)

BLIND = {"none"}
MOVES = {"sinusoidal", "learned", "rotary of values, too"}
RELATIVE = EVERY.keys() - BLIND - {"sinusoidal", "learned", "ALiBi"}


@pytest.mark.parametrize("name", EVERY)
def test_row_74_one_switch_changes_what_a_model_knows_of_places(name):
    """All schemes but NoPositions see order; only those that mark embeddings or values see a shift of all positions."""
    model, x = small(EVERY[name]), inputs()
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(3))
    unshifted = model(x, shifted(0))
    shuffled = (model(x[:, order], shifted(0)) - unshifted[:, order]).abs().max() / unshifted.abs().max()
    assert (shuffled < 1e-12) == (name in BLIND)
    assert name in BLIND or shuffled > 1e-3
    moved = (model(x, shifted(1000)) - unshifted).abs().max() / unshifted.abs().max()
    assert (moved < 1e-11) == (name not in MOVES)
    assert name not in MOVES or moved > 1e-3


@pytest.mark.parametrize("name", EVERY)
def test_row_74_everything_trained_gets_a_gradient(name):
    model = small(EVERY[name])
    model(inputs(), shifted(0)).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 0, key


@pytest.mark.slow
def test_row_74_schemes_learn_within_one_budget():
    """Two causal layers learn to name the token three places back, in 200 steps with one seed and one rate.

    Chance is 1/16. Schemes whose scores can single out one distance learn it; a causal mask alone is far from enough.
    """
    symbols, back, rows = 16, 3, 64
    accuracy = {}
    for name, scheme in EVERY.items():
        torch.manual_seed(4)
        embed, model = nn.Embedding(symbols, WIDTH), Small(scheme, pattern=Causal())
        trained = [*embed.parameters(), *model.parameters()]
        optimizer = torch.optim.Adam(trained, lr=5e-3)
        tokens = Tokens.range(24)
        for _ in range(200):
            ids = torch.randint(0, symbols, (rows, 24))
            logits = model(embed(ids), tokens) @ embed.weight.T
            loss = nn.functional.cross_entropy(logits[:, back:].flatten(0, 1), ids[:, :-back].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy[name] = (logits[:, back:].argmax(-1) == ids[:, :-back]).float().mean().item()
    print({name: round(share, 3) for name, share in accuracy.items()})
    for name in RELATIVE:
        assert accuracy[name] > 0.9, accuracy
    assert accuracy["none"] < 0.3


def test_row_74_schemes_make_the_steps_of_scores():
    relative, fixed, t5, alibi = (EVERY[n] for n in ("relative", "relative, fixed", "T5", "ALiBi"))
    (step,) = relative.scores(HEADS, HEAD_DIM, True)
    assert isinstance(step, RelativeKey)
    assert isinstance(step.table, nn.Parameter)
    assert step.table.shape == (11, HEAD_DIM)
    (again,) = relative.scores(HEADS, HEAD_DIM, True)
    assert again.table is not step.table
    (step,) = fixed.scores(HEADS, HEAD_DIM, False)
    assert not isinstance(step.table, nn.Parameter)
    assert step.parameters == ()
    (step,) = t5.scores(HEADS, HEAD_DIM, False)
    assert isinstance(step, RelativeBias)
    assert isinstance(step.table, nn.Parameter)
    assert (step.table.shape, step.bidirectional, step.max_distance) == ((8, HEADS), False, 16)
    assert alibi.scores(6, HEAD_DIM, True) == (ALiBi(alibi_slopes(6)),)
    assert LinearBias((1, 0.5)).scores(2, 8, True) == (ALiBi((1.0, 0.5)),)
    assert [s.shared for s in (relative, fixed, t5, alibi, ROTARY)] == [False, False, True, True, True]
    for name, scheme in EVERY.items():
        if scheme.marks != "scores":
            assert scheme.at(0).scores(HEADS, HEAD_DIM, True) == (), name


def test_row_74_relative_keys_are_the_printed_formula():
    """Checks e_ij = q_i . (k_j + a[clip(j - i)]) / sqrt(D), in a loop over queries."""
    q, k, v = torch.randn(3, 1, 2, LENGTH, HEAD_DIM, dtype=torch.float64)
    (step,) = Relative(3).scores(2, HEAD_DIM, True)
    table = step.parameters[0].double()
    ours = attend(q, k, v, score=step.with_parameters((table,)), backend="dense")
    for i in range(LENGTH):
        rows = torch.tensor([min(max(j - i, -3), 3) + 3 for j in range(LENGTH)])
        weight = ((k + table[rows]) @ q[:, :, i, :, None] / HEAD_DIM**0.5).softmax(-2)
        torch.testing.assert_close(ours[:, :, i], (weight * v).sum(-2), rtol=0, atol=1e-12)


def test_row_74_fixed_relative_keys_are_the_published_sinusoids():
    """NEZHA: row r, r = 0 .. 2 clip, is sin and cos of r / 10000^(2i/D), side by side."""
    (step,) = Relative(4, sinusoidal=True).scores(2, 6, True)
    for row in range(9):
        for i in range(3):
            angle = row / 10000 ** (2 * i / 6)
            values = step.table[row, 2 * i : 2 * i + 2].tolist()
            assert values == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-7)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_row_74_t5_buckets_are_those_of_transformers(bidirectional):
    config = T5Config(
        d_model=WIDTH, num_heads=HEADS, relative_attention_num_buckets=8, relative_attention_max_distance=16
    )
    config.is_decoder = not bidirectional
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    (step,) = T5Bias(8, 16).scores(HEADS, HEAD_DIM, bidirectional)
    weight = torch.randn(8, HEADS)
    theirs.relative_attention_bias.weight = nn.Parameter(weight)
    at, zeros = Tokens.range(40), torch.zeros(1, HEADS, 40, 40)
    ours = step.with_parameters((weight,)).apply(zeros, zeros, at, at, 1.0)
    assert torch.equal(ours, theirs.compute_bias(40, 40).detach())


@pytest.mark.parametrize("name", [*EVERY, "everything at once"])
def test_row_74_schemes_return_from_a_config_as_they_were(name):
    by_hand = PerLayer((Rotary(pairing=((0, 2), (3, 1)), schedule=(1.0, 0.1), values=True, dims=4), NONE))
    scheme = EVERY.get(name, by_hand)
    spec = ModelSpec.of("llama", vocab=17, width=WIDTH, layers=2, heads=HEADS, hidden=40, positions=scheme)
    assert spec_from_own(own_config(spec)) == spec
