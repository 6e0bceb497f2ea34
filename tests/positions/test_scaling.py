"""Rotary scalings against transformers' own functions."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headway.positions import DynamicNTK, LinearScaling, Llama3, LongRope, Rotary, YaRN

# transformers computes powers in float32, we in float64: the oracle is right to a few units of 2^-24
TOLERANCE = {"rtol": 4e-7, "atol": 0.0}


def oracle(kind, *, theta=10000.0, head_dim=64, context=4096, dims=None, length=None, **parameters):
    parameters = {"rope_type": kind, "rope_theta": theta, **parameters}
    if dims is not None:
        parameters["partial_rotary_factor"] = dims / head_dim
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=context,
        rope_parameters=parameters,
    )
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    return frequencies, float(amplitude)


def compare(rotary, expected, head_dim=64, length=None):
    frequencies, amplitude = expected
    torch.testing.assert_close(rotary.frequencies(head_dim, length).float(), frequencies, **TOLERANCE)
    assert rotary.amplitude == pytest.approx(amplitude, rel=1e-12)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("dims", [None, 32, 16])
def test_linear(theta, dims):
    rotary = Rotary(theta, pairing="halves", dims=dims, scaling=LinearScaling(4.0))
    compare(rotary, oracle("linear", theta=theta, dims=dims, factor=4.0))


@pytest.mark.parametrize("length", [None, 1, 4096, 4097, 5000, 16384, 100_000])
@pytest.mark.parametrize("dims", [None, 32])
def test_dynamic(length, dims):
    rotary = Rotary(pairing="halves", dims=dims, scaling=DynamicNTK(2.0, 4096))
    compare(rotary, oracle("dynamic", dims=dims, factor=2.0, length=length), length=length)


YARNS = [
    {},
    {"truncate": False},
    {"beta_fast": 16.0, "beta_slow": 2.0},
    {"attention_factor": 0.7},
    {"mscale": 1.0, "mscale_all_dim": 1.0},
    {"mscale": 0.707, "mscale_all_dim": 1.3},
]


@pytest.mark.parametrize("options", YARNS, ids=str)
@pytest.mark.parametrize(
    ("theta", "factor", "context"),
    [
        (10000.0, 4.0, 4096),
        (1e6, 2.5, 32768),
        (150000.0, 32.0, 64),
        (10000.0, 1.0, 4096),
        (100.0, 4.0, 4096),  # even the last pair rotates often: the ramp ends beyond the pairs
        (10000.0, 4.0, 6),  # no pair rotates fast enough: an empty ramp
    ],
)
def test_yarn(options, theta, factor, context):
    rotary = Rotary(theta, pairing="halves", scaling=YaRN(factor, context, **options))
    expected = oracle(
        "yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=context,
        context=context,
        **options,
    )
    compare(rotary, expected)


@pytest.mark.parametrize(
    ("theta", "head_dim", "context", "factor", "low", "high"),
    [
        (500000.0, 128, 8192, 8.0, 1.0, 4.0),
        (500000.0, 64, 8192, 32.0, 1.0, 4.0),
        (10000.0, 64, 32, 4.0, 0.5, 2.0),
    ],
)
def test_llama3(theta, head_dim, context, factor, low, high):
    rotary = Rotary(theta, pairing="halves", scaling=Llama3(factor, low, high, context))
    expected = oracle(
        "llama3",
        theta=theta,
        head_dim=head_dim,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=context,
    )
    compare(rotary, expected, head_dim)


@pytest.mark.parametrize("length", [None, 1, 512, 513, 9000])
@pytest.mark.parametrize("how", [{"factor": 8.0}, {"attention_factor": 1.25}, {"factor": 1.0}])
def test_longrope(length, how):
    short = [1.0 + 0.01 * i for i in range(32)]
    long = [1.5 + 0.3 * i for i in range(32)]
    rotary = Rotary(pairing="halves", scaling=LongRope(short, long, 512, **how))
    expected = oracle(
        "longrope",
        context=4096,
        length=length,
        short_factor=short,
        long_factor=long,
        original_max_position_embeddings=512,
        **how,
    )
    compare(rotary, expected, length=length)


def test_longrope_without_factor_is_what_transformers_derives():
    """transformers derives a missing factor as max_position_embeddings / original; here the factor is given."""
    lists = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    _, amplitude = oracle("longrope", context=4096, original_max_position_embeddings=512, **lists)
    assert LongRope(**lists, trained_context=512, factor=4096 / 512).amplitude == pytest.approx(
        amplitude, rel=1e-12
    )


def test_a_mutant_would_be_seen():
    """The comparison can fail: a change of one part in a million is outside the tolerance."""
    with pytest.raises(AssertionError):
        compare(
            Rotary(10000.0 * (1 + 2e-6), pairing="halves", scaling=LinearScaling(4.0)),
            oracle("linear", factor=4.0),
        )


def test_scalings_leave_fast_pairs_and_stretch_slow_ones():
    """The fastest pair is kept, and the slowest is divided by the factor."""
    plain = Rotary(pairing="halves").frequencies(64)
    for scaling in (YaRN(8.0, 4096), Llama3(8.0, 1.0, 4.0, 4096)):
        ratio = plain / Rotary(pairing="halves", scaling=scaling).frequencies(64)
        assert ratio[0] == 1
        assert ratio[-1] == pytest.approx(8, rel=1e-12)
        assert (ratio.diff() >= -1e-12).all()


def test_dynamic_at_the_stretched_length_slows_the_last_pair_by_its_growth():
    """theta' makes the slowest pair slower by exactly factor * L / C - (factor - 1)."""
    for length in (4096, 6000, 20_000):
        ratio = (
            Rotary(pairing="halves").frequencies(64)[-1]
            / Rotary(pairing="halves", scaling=DynamicNTK(3.0, 4096)).frequencies(64, length)[-1]
        )
        assert ratio == pytest.approx(3 * length / 4096 - 2, rel=1e-9)


def test_values_print_compare_and_normalise():
    for scaling in (
        LinearScaling(2),
        DynamicNTK(2, 8),
        YaRN(2, 8, mscale=1, mscale_all_dim=1),
        Llama3(8, 1, 4, 8192),
        LongRope([1, 2], [3, 4], 8, factor=2),
    ):
        assert eval(repr(scaling)) == scaling
        assert hash(eval(repr(scaling))) == hash(scaling)
    assert LinearScaling(2) == LinearScaling(2.0)
    assert YaRN(4.0, 32).amplitude == pytest.approx(0.1 * math.log(4) + 1)
    assert YaRN(1.0, 32).amplitude == 1.0
