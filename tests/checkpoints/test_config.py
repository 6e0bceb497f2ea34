"""config.json -> spec -> config.json keeps the meaning; every contradiction is named; transformers agrees."""

import copy
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from headway.checkpoints.hf.config import config_from_spec, spec_from_config, unsupported_by_transformers
from headway.checkpoints.hf.layouts import LAYOUTS
from headway.errors import ConfigError, HeadwayError
from headway.models import ModelSpec
from headway.nn.norms import QK_NORMS
from headway.patterns import Causal, Sink, Window
from headway.positions import DynamicNTK, LinearScaling, Llama3, LongRope, NoPositions, Rotary, YaRN
from tests.checkpoints.hf import config_dict
from tests.checkpoints.test_parity import FAMILIES as FAMILY_CASES
from tests.checkpoints.test_parity import ROPES

SCALINGS = [
    None,
    LinearScaling(2.0),
    DynamicNTK(4.0, 16),
    YaRN(4.0, 16),
    YaRN(2.3, 16),
    YaRN(4.0, 16, beta_fast=8.0, attention_factor=0.5, truncate=False),
    YaRN(2.0, 32, mscale=0.7, mscale_all_dim=0.9),
    Llama3(8.0, 1.0, 4.0, 32),
    LongRope((1.0, 1.5), (2.0, 3.0), 16, factor=4.0),
    LongRope((1.0, 1.5), (2.0, 3.0), 16, factor=4.0, attention_factor=1.25),
]


@st.composite
def specs(draw) -> ModelSpec:
    layers = draw(st.integers(1, 4))
    heads, group = draw(st.sampled_from([(2, 1), (4, 2), (3, 3)]))
    scaling = draw(st.sampled_from(SCALINGS))
    pairing = draw(st.sampled_from(["halves", "halves", "halves", "adjacent", ((0, 3), (2, 1))]))
    trained = draw(st.sampled_from([16, 32, 64, 100]))
    patterns_of = {"one": [Window.last(3)], "mixed": [Window.last(3), Causal()], "none": [Causal()]}
    patterns_of["odd"] = [Causal() & (Window.last(3) | Sink(2)), Window.last(2, step=2), Window.last(5)]
    choices = patterns_of[draw(st.sampled_from(sorted(patterns_of)))]
    positions = draw(
        st.sampled_from(
            [Rotary(500.0, pairing=pairing, scaling=scaling), Rotary(pairing="halves", dims=2), NoPositions()]
        )
    )
    return ModelSpec(
        family=draw(st.sampled_from(sorted(name for name, layout in LAYOUTS.items() if layout.generic))),
        vocab=17,
        width=12,
        layers=layers,
        heads=heads,
        kv_heads=heads // group,
        head_dim=draw(st.sampled_from([4, 4, 4, 6])) if scaling is None and isinstance(pairing, str) else 4,
        hidden=20,
        patterns=tuple(draw(st.sampled_from(choices)) for _ in range(layers)),
        positions=positions,
        norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(
            st.sampled_from(
                [norm for norm in QK_NORMS if norm != "rotated" or not positions.length_dependent]
            )
        ),
        tied=draw(st.booleans()),
        trained_context=trained,
        max_context=draw(st.sampled_from([None, trained, 4 * trained])),
        attention_dropout=draw(st.sampled_from([0.0, 0.1])),
        init_std=draw(st.sampled_from([0.02, 0.5])),
    )


@given(specs())
def test_every_spec_comes_back_from_its_config(spec):
    config = config_from_spec(spec)
    assert spec_from_config(config) == spec
    assert (config["model_type"] == "headway") == (unsupported_by_transformers(spec) is not None)


@given(specs())
def test_transformers_takes_every_plain_config_without_a_word_and_refuses_the_others(spec):
    config = config_from_spec(spec)
    settings = copy.deepcopy(config)
    kind = settings.pop("model_type")
    if kind == "headway":
        with pytest.raises((KeyError, ValueError), match="headway"):
            AutoConfig.for_model(kind, **settings)
        return
    theirs = AutoConfig.for_model(kind, **settings)
    assert theirs.rope_parameters["rope_theta"] == spec.positions.theta
    written = theirs.to_dict()
    reread = spec_from_config(
        {key: value for key, value in written.items() if key in config or key == "rope_parameters"}
    )
    facts = {"trained_context": spec.trained_context, "max_context": spec.max_context, "family": spec.family}
    assert replace(reread, **facts) == spec


@pytest.mark.parametrize("name", [n for n in ROPES if "implicit" not in n and "null" not in n])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_transformers_logs_nothing_about_what_we_write(name, family, caplog):
    """Both schemas are written side by side; transformers 5.x accepts them without a warning."""
    from transformers.utils import logging

    spec = spec_from_config(config_dict(family, head_dim=8, **ROPES[name]))
    config = config_from_spec(spec)
    logger = logging.get_logger("transformers")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_warning()
    logger.addHandler(caplog.handler)
    try:
        settings = copy.deepcopy(config)
        theirs = AutoConfig.for_model(settings.pop("model_type"), **settings)
    finally:
        logger.removeHandler(caplog.handler)
        logging.set_verbosity(verbosity)
    assert [record.getMessage() for record in caplog.records] == []
    assert spec_from_config({**theirs.to_dict(), "architectures": None}).positions == spec.positions


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_the_configs_that_transformers_writes_are_read(name):
    """to_dict() of a config has every key that transformers knows, so headway must know them all."""
    config = config_dict(name.split()[0], **FAMILY_CASES[name])
    settings = copy.deepcopy(config)
    theirs = AutoConfig.for_model(settings.pop("model_type"), **settings)
    assert spec_from_config(theirs.to_dict()) == spec_from_config(config)
    assert spec_from_config(theirs.to_diff_dict()) == spec_from_config(config)


def rope(**values):
    return {"rope_scaling": values}


BAD = {
    "missing key": ({"hidden_size": None}, 'lacks "hidden_size"'),
    "wrong bool": ({"tie_word_embeddings": "yes"}, '"tie_word_embeddings" must be true or false'),
    "width": ({"hidden_size": 50}, "hidden_size 50 is not a multiple of num_attention_heads 6"),
    "odd head_dim": ({"head_dim": 7}, "head_dim 7 is odd"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "llama with a window": (
        {"sliding_window": 8},
        '"sliding_window" is 8, which is unsupported for model_type llama',
    ),
    "llama layer types": ({"layer_types": ["sliding_attention"] * 3}, "transformers ignores layer_types"),
    "activation": ({"hidden_act": "selu"}, "activation .selu."),
    "rope not an object": (
        {"rope_scaling": "yarn"},
        r"rope_scaling must be null or an object such as .*got 'yarn'",
    ),
    "rope without type": (rope(factor=2.0), "lacks rope_type"),
    "two types": (
        rope(type="yarn", rope_type="linear", factor=2.0),
        "type is .yarn. but rope_type is .linear.",
    ),
    "rope key": (
        rope(rope_type="yarn", factor=2.0, beta_fats=3),
        r'unknown key "beta_fats" .did you mean "beta_fast"',
    ),
    "longrope length": (
        rope(rope_type="longrope", short_factor=[1.0], long_factor=[1.0] * 4, factor=2.0),
        r"short_factor must list 4 numbers, one per rotated pair of dims, got 1 numbers",
    ),
    "dynamic anchor": (
        rope(rope_type="dynamic", factor=2.0, original_max_position_embeddings=16),
        r"scales from max_position_embeddings .64., but .* is 16",
    ),
    "linear original": (
        rope(type="linear", factor=2.0, original_max_position_embeddings=16),
        r"16 x factor 2\.0 is not max_position_embeddings 64",
    ),
    "original without scaling": (
        {"original_max_position_embeddings": 16},
        "is 16, but no rope scaling is set",
    ),
    **{
        f"original {number}": (
            {"original_max_position_embeddings": number},
            "original_max_position_embeddings must be a positive whole number",
        )
        for number in (math.nan, math.inf, 1e300, 2.5)
    },
    "two thetas": (
        {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        r"rope_theta is 500\.0 at the top .* but 1000000\.0",
    ),
    "two schemas": (
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 3.0},
        },
        "rope_scaling and rope_parameters disagree",
    ),
    "partial rotary": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary",
    ),
    "rope by layer": (
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        "different rotary positions",
    ),
}
BAD_WINDOWS = {
    "zero": (
        {"sliding_window": 0},
        "sliding_window must be a whole number of at least 1 .*or null for no window, got 0",
    ),
    "fraction": ({"sliding_window": 4.0}, "got 4.0"),
    "true": ({"sliding_window": True}, "got True"),
    "layer types kind": (
        {"layer_types": ["full_attention", "slidng_attention", "full_attention"]},
        r'layer_types\[1\] is .slidng_attention. .did you mean "sliding_attention"',
    ),
    "sliding without window": (
        {"sliding_window": None, "layer_types": ["sliding_attention"] * 3},
        "sliding_attention layers, but no window is set",
    ),
    "sliding switched off": (
        {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3},
        "use_sliding_window False",
    ),
    "max_window_layers": ({"max_window_layers": "all"}, '"max_window_layers" must be a whole number'),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_configs_are_named(name):
    changes, message = BAD[name]
    with pytest.raises(HeadwayError, match=message):
        spec_from_config(config_dict("llama") | changes)


@pytest.mark.parametrize("name", BAD_WINDOWS)
def test_bad_windows_are_named(name):
    changes, message = BAD_WINDOWS[name]
    base = config_dict("qwen2", use_sliding_window=True, sliding_window=4)
    with pytest.raises(ConfigError, match=message):
        spec_from_config(base | changes)


def test_the_context_before_scaling_and_the_one_served_are_kept_apart():
    yarn = {"rope_type": "yarn", "factor": 4.0}
    for changes, before, served in (
        (rope(**yarn, original_max_position_embeddings=16), 16, 64),
        (rope(**yarn), 64, 256),  # max_position_embeddings left as it was before scaling
        (rope(type="dynamic", factor=2.0), 64, 128),
        (rope(type="linear", factor=4.0, original_max_position_embeddings=16), None, 64),
        ({}, None, 64),
    ):
        spec = spec_from_config(config_dict("llama", **changes))
        assert getattr(spec.positions.scaling, "trained_context", None) == before
        assert (spec.trained_context, spec.max_context) == (served, None)


@pytest.mark.parametrize("head_dim", range(8, 97, 4))
def test_a_rotated_share_of_a_head_is_written_so_that_no_dim_is_lost(head_dim):
    """Readers round head_dim * share down, transformers too, and 44 * (30 / 44) is less than 30."""
    sizes = {
        "vocab": 31,
        "width": 2 * head_dim,
        "layers": 1,
        "heads": 2,
        "kv_heads": 2,
        "hidden": 8,
        "head_dim": head_dim,
    }
    for dims in range(2, head_dim, 2):
        spec = ModelSpec.of("stablelm", **sizes, positions=Rotary(pairing="halves", dims=dims))
        config = config_from_spec(spec)
        assert config["model_type"] == "stablelm"
        assert int(head_dim * config["partial_rotary_factor"]) == dims
        assert spec_from_config(config) == spec


def test_a_newer_format_is_refused():
    spec = replace(spec_from_config(config_dict("llama")), positions=NoPositions())
    config = config_from_spec(spec)
    config["headway"]["format"] = 4
    with pytest.raises(ConfigError, match=r"headway\.format is 4; this version of headway reads 3"):
        spec_from_config(config)
    config["headway"]["format"] = 3
    config["headway"]["haeds"] = 2
    with pytest.raises(ConfigError, match=r"headway has no key 'haeds' .did you mean \"heads\""):
        spec_from_config(config)
