"""Rescaled rotary frequencies: what stays the same, what becomes slower, and what is refused."""

import pytest
import torch

from headway.checkpoints import load_folder, save_state
from headway.checkpoints.restore import fill
from headway.errors import ConfigError
from headway.models import ModelSpec, Softmax, build
from headway.positions import DynamicNTK, Learned, LinearScaling, Llama3, NoPositions, PerLayer, Rotary, YaRN
from headway.surgery import METHODS, stretch_context
from headway.tokens import Tokens

TRAINED = 16


def shape(**fields):
    return ModelSpec.of("llama", vocab=37, width=24, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=32,
                        trained_context=TRAINED, init_std=0.3, **fields)  # fmt: skip


def make(**fields):
    spec = shape(**fields)
    return spec, build(spec, seed=1, dtype=torch.float64).state_dict()


def run(model, count, step=1):
    ids = torch.randint(37, (1, count), generator=torch.Generator().manual_seed(3))
    index = torch.arange(count)[None]
    with torch.no_grad():
        return fill(*model, dtype=torch.float64)(ids, tokens=Tokens(index, position=index * step))


@pytest.mark.parametrize("method", METHODS)
def test_a_factor_of_1_changes_no_row_within_the_trained_context(method):
    model = make()
    stretched = stretch_context(*model, method, 1)
    assert stretched[0].trained_context == TRAINED
    assert torch.allclose(run(stretched, TRAINED), run(model, TRAINED), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_a_stretched_model_computes_something_else_beyond_the_trained_context(method):
    model = make()
    difference = run(stretch_context(*model, method, 4), 40) - run(model, 40)
    assert difference[:, TRAINED + 1 :].abs().amax() > 1e-3


def test_linear_gives_position_4p_the_angles_of_p():
    model = make()
    assert torch.allclose(
        run(stretch_context(*model, "linear", 4), TRAINED, step=4),
        run(model, TRAINED),
        rtol=1e-12,
        atol=1e-12,
    )


def test_ntk_keeps_the_fastest_pair_and_slows_the_slowest_by_the_factor():
    old, new = make()[0], stretch_context(*make(), "ntk", 4)[0]
    before, after = old.positions.frequencies(8), new.positions.frequencies(8)
    assert after[0] == before[0]
    assert float(before[-1] / after[-1]) == pytest.approx(4, rel=1e-12)
    assert (before[1:-1] / after[1:-1] > 1).all()
    assert (before[1:-1] / after[1:-1] < 4).all()


def test_dynamic_leaves_rows_within_the_trained_context_bit_for_bit():
    model = make()
    stretched = stretch_context(*model, "dynamic", 4)
    assert torch.equal(run(stretched, TRAINED), run(model, TRAINED))
    assert not torch.equal(run(stretched, TRAINED + 1), run(model, TRAINED + 1))


@pytest.mark.parametrize(
    ("method", "scaling"),
    [
        ("linear", LinearScaling(4.0)),
        ("ntk", None),
        ("yarn", YaRN(4.0, TRAINED)),
        ("llama3", Llama3(4.0, 1.0, 4.0, TRAINED)),
        ("dynamic", DynamicNTK(4.0, TRAINED)),
    ],
)
def test_a_folder_says_it_again(method, scaling, tmp_path):
    spec, state = stretch_context(*make(max_context=TRAINED), method, 4)
    assert spec.positions.scaling == scaling
    assert (spec.trained_context, spec.max_context) == (4 * TRAINED, 4 * TRAINED)
    save_state(tmp_path / "m", spec, {name: value.float() for name, value in state.items()})
    folder = load_folder(tmp_path / "m")
    assert folder.spec == spec
    assert folder.config["model_type"] == "llama"


def test_limits_follow():
    assert stretch_context(*make(), "linear", 4)[0].max_context is None
    assert stretch_context(*make(max_context=100), "linear", 4)[0].max_context == 100


def test_of_positions_by_layer_those_that_turn_are_stretched():
    rotary = Rotary(pairing="halves")
    stretched, _ = stretch_context(shape(positions=PerLayer((rotary, NoPositions()))), {}, "linear", 4)
    assert stretched.positions == PerLayer(
        (Rotary(pairing="halves", scaling=LinearScaling(4.0)), NoPositions())
    )


def test_ntk_takes_the_head_dim_of_each_layer():
    spec = shape(mixers=(Softmax(), Softmax(head_dim=16)))
    new = stretch_context(spec, {}, "ntk", 4)[0]
    thetas = [scheme.theta for scheme in new.positions.schemes]
    assert thetas == pytest.approx([10000.0 * 4 ** (8 / 6), 10000.0 * 4 ** (16 / 14)], rel=1e-12)


def test_partial_rotary_stretches_what_turns():
    stretched = stretch_context(*make(positions=Rotary(pairing="halves", dims=6)), "ntk", 4)[0]
    assert stretched.positions.theta == pytest.approx(10000.0 * 4 ** (6 / 4), rel=1e-12)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (NoPositions(), r"NoPositions\(\), not rotary: there are no frequencies to rescale"),
        (Learned(16), "a trained table of 16 rows, and row 16 is undefined"),
        (
            Rotary(pairing="halves", scaling=LinearScaling(2.0)),
            r"already rescaled by LinearScaling\(factor=2.0\); start from",
        ),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_positions_that_cannot_be_stretched(positions, message, method):
    with pytest.raises(ConfigError, match=message):
        stretch_context(shape(positions=positions), {}, method, 2)


@pytest.mark.parametrize("factor", [0.5, 0, -1, float("nan"), float("inf"), True, "2"])
def test_factors_that_are_none(factor):
    with pytest.raises(ConfigError, match="a number of at least 1, got"):
        stretch_context(*make(), "linear", factor)


def test_methods_that_are_none():
    with pytest.raises(
        ConfigError, match=r'no method \'yarm\' \(did you mean "yarn"\?\); there are linear, ntk'
    ):
        stretch_context(*make(), "yarm", 2)
    with pytest.raises(ConfigError, match="more than 2 rotated dims, got 2; use linear"):
        stretch_context(*make(positions=Rotary(pairing="halves", dims=2)), "ntk", 2)
    with pytest.raises(ConfigError, match="more than 2 rotated dims"):
        stretch_context(*make(positions=Rotary(pairing="halves", dims=2)), "dynamic", 2)
