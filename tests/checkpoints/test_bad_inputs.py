"""Configs and files that other libraries crash on or misread; `transformers` says what the readable ones mean."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headway.checkpoints.hf.config import config_from_spec, spec_from_config
from headway.checkpoints.restore import load_model
from headway.checkpoints.saving import save_folder
from headway.errors import ConfigError
from headway.models import build
from headway.patterns import Causal, Window
from tests.checkpoints.hf import config_dict
from tests.checkpoints.hostile import SPEC
from tests.checkpoints.test_parity import both

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}
COMPLETE = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 16},
    "longrope": {**LONGROPE, "factor": 4.0, "original_max_position_embeddings": 16},
}


def schemas(rope: dict, theta: float | None = None) -> dict[str, dict]:
    """Returns the same settings in the three schemas of transformers: up to 4.42, up to 4.57, from 5.0."""
    top = {} if theta is None else {"rope_theta": theta}
    old = {("type" if key == "rope_type" else key): value for key, value in rope.items()}
    return {
        "old": {**top, "rope_scaling": old},
        "new": {**top, "rope_scaling": rope},
        "v5": {"rope_parameters": {**top, **rope}},
        "v5, theta outside": {**top, "rope_parameters": rope},
    }


@pytest.mark.parametrize("kind", COMPLETE)
def test_three_schemas_are_one_meaning_and_theta_is_kept(kind):
    specs = [
        spec_from_config(config_dict("llama", **changes))
        for changes in schemas(COMPLETE[kind], 777.0).values()
    ]
    assert all(spec == specs[0] for spec in specs)
    assert specs[0].positions.theta == 777.0
    assert specs[0].positions.scaling is not None
    written = config_from_spec(specs[0])
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 777.0


@pytest.mark.parametrize("rope", [{"rope_type": "yarn", "factor": 4.0}, LLAMA3, {**LONGROPE, "factor": 4.0}, LONGROPE],
                         ids=lambda r: f"{r['rope_type']} {r.get('factor')}")  # fmt: skip
@pytest.mark.parametrize("original", ["missing", "null"])
def test_a_missing_original_context_is_what_transformers_takes_for_it(rope, original):
    incomplete = rope | ({"original_max_position_embeddings": None} if original == "null" else {})
    for changes in schemas(incomplete, 500.0).values():
        spec = spec_from_config(config_dict("llama", **changes))
        assert spec.positions.scaling.trained_context == 64
        settings = copy.deepcopy(config_dict("llama", **schemas(rope, 500.0)["v5"]))
        theirs = AutoConfig.for_model(settings.pop("model_type"), **settings)
        for length in (20, 100):
            expected, amplitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
                theirs, torch.device("cpu"), seq_len=length
            )
            actual = spec.positions.frequencies(8, length).float()
            torch.testing.assert_close(actual, expected, rtol=4e-7, atol=0)
            assert spec.positions.amplitude == pytest.approx(float(amplitude), rel=1e-12)


@pytest.mark.parametrize("kind", COMPLETE)
@pytest.mark.parametrize("schema", ["old", "new", "v5"])
@pytest.mark.parametrize("factor", [0.5, 0, -2.0, float("nan"), "4", True])
def test_a_factor_below_1_or_no_number_is_named(kind, schema, factor):
    rope = {**COMPLETE[kind], "factor": factor}
    if kind in ("yarn", "longrope"):
        del rope["original_max_position_embeddings"]
    with pytest.raises(ConfigError, match=rf"factor must be .*got '?{factor}"):
        spec_from_config(config_dict("llama", **schemas(rope)[schema]))


@pytest.mark.parametrize("schema", ["old", "new", "v5"])
@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "ntk", "factor": 2.0}, "unknown rope_type 'ntk'; known are default, linear"),
        ({"rope_type": "Yarn", "factor": 2.0}, 'unknown rope_type .Yarn. .did you mean "yarn"'),
        ({"rope_type": ["yarn"], "factor": 2.0}, r"unknown rope_type \['yarn'\]"),
        ({"rope_type": "linear"}, 'rope_type "linear" needs factor'),
        ({"rope_type": "linear", "factor": None}, 'rope_type "linear" needs factor'),
        ({"rope_type": "dynamic"}, 'rope_type "dynamic" needs factor'),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}, "needs low_freq_factor, high"),
        ({**COMPLETE["yarn"], "factor": 8.0}, "YaRN factor is 8, but max_position_embeddings .* 64 / 16 = 4"),
        ({**COMPLETE["yarn"], "original_max_position_embeddings": 0}, "positive whole number, got 0"),
        ({**COMPLETE["yarn"], "original_max_position_embeddings": 16.5}, "positive whole number, got 16.5"),
        ({**COMPLETE["yarn"], "attention_factor": -1.0}, "attention_factor must be .* got -1.0"),
    ],
)  # fmt: skip
def test_bad_rope_is_named_in_every_schema(schema, rope, message):
    key = "rope_parameters" if schema == "v5" else "rope_scaling"
    with pytest.raises(ConfigError, match=message) as error:
        spec_from_config(config_dict("llama", **schemas(rope)[schema]))
    assert key in str(error.value) or "YaRN: " in str(error.value)


@pytest.mark.parametrize("nothing", [{"rope_scaling": None}, {"rope_parameters": None}, {"rope_scaling": {}},
                                     {"rope_scaling": None, "rope_parameters": None}], ids=str)  # fmt: skip
def test_null_rope_is_plain_rope_at_its_theta(nothing):
    spec = spec_from_config(config_dict("llama", rope_theta=500.0, **nothing))
    assert (spec.positions.theta, spec.positions.scaling, spec.trained_context) == (500.0, None, 64)


@pytest.mark.parametrize("factor", [0.7, 1.0])
def test_an_explicit_attention_factor_is_the_amplitude(factor):
    for kind in ("yarn", "longrope"):
        for changes in schemas({**COMPLETE[kind], "attention_factor": factor}).values():
            spec = spec_from_config(config_dict("llama", **changes))
            assert spec.positions.amplitude == factor
            assert spec_from_config(config_from_spec(spec)) == spec


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "ministral"])
@pytest.mark.parametrize("kv_heads", [4, 5, 12, 7])
def test_kv_heads_that_do_not_divide_the_heads_are_named(family, kv_heads):
    with pytest.raises(ConfigError, match=rf"6 query heads cannot share {kv_heads} .* one of \[1, 2, 3, 6\]"):
        spec_from_config(config_dict(family, num_key_value_heads=kv_heads))


@pytest.mark.parametrize("window", [1, 2, 23, 24, 25, 1000])
def test_a_window_is_transformers_window_at_every_length_around_the_row(window):
    """Rows of 24 tokens: windows of 1, T - 1, T, T + 1 and far more, with gradients."""
    logits, gradient = both(config_dict("mistral", sliding_window=window, head_dim=8))
    assert logits < 1e-5
    assert window == 1 or gradient < 1e-4  # with one visible key the gradient of queries is 0 on both sides
    assert spec_from_config(config_dict("mistral", sliding_window=window)).patterns[0] == Window.last(window)


WINDOWED = {"use_sliding_window": True, "sliding_window": 4}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2", {**WINDOWED, "layer_types": ["full_attention"] * 4}, "lists 4 layers, but num_hidden_layers is 3"),
        ("qwen2", {**WINDOWED, "layer_types": []}, "lists 0 layers, but num_hidden_layers is 3"),
        ("qwen2", {**WINDOWED, "layer_types": "LLG"}, "must be a list .* got 'LLG'"),
        ("qwen2", {**WINDOWED, "layer_types": [None] * 3}, r"layer_types\[0\] is None; known are"),
        ("ministral", {"sliding_window": 4, "layer_types": "SSF"}, "must be a list .* got 'SSF'"),
        ("ministral", {"sliding_window": 4, "layer_types": ["full_attention"] * 2}, "lists 2 layers"),
        ("ministral", {"sliding_window": 4, "layer_types": ["chunked_attention"] * 3}, r"\[0\] is 'chunked_attention'"),
        ("llama", {"layer_types": "full_attention"}, "must be a list .* got 'full_attention'"),
        ("llama", {"layer_types": ["full_attention"]}, "lists 1 layers, but num_hidden_layers is 3"),
        ("mistral", {"sliding_window": 4, "layer_types": ["full_attention"] * 2}, "lists 2 layers"),
        ("mistral", {"sliding_window_pattern": "LLLLLG"}, 'unknown key "sliding_window_pattern"'),
        ("qwen2", {"sliding_window_pattern": 6}, 'unknown key "sliding_window_pattern"'),
        ("qwen2", {**WINDOWED, "use_sliding_window": "false"}, "must be true or false, got 'false'"),
        ("mistral", {"use_sliding_window": False, "sliding_window": 4}, "transformers ignores it .*_window 4"),
        ("ministral", {"use_sliding_window": False, "sliding_window": 4}, "transformers ignores it .*_window 4"),
        ("mistral", {"use_sliding_window": True, "sliding_window": 4}, '"use_sliding_window" is True, which is unsupp'),
    ],
    ids=str,
)  # fmt: skip
def test_layers_and_windows_that_contradict_are_named(family, changes, message):
    with pytest.raises(ConfigError, match=message):
        spec_from_config(config_dict(family, **changes))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_is_switched_off_is_none_in_any_layer(family):
    """Switched off, no layer has the window; switched on, the layers from max_window_layers on have it."""
    switched_off = {"use_sliding_window": False, "sliding_window": 4}
    for first in (0, 1, 3, 28):
        spec = spec_from_config(config_dict(family, **switched_off, max_window_layers=first))
        assert spec.patterns == (Causal(),) * 3
        spec = spec_from_config(config_dict(family, **WINDOWED, max_window_layers=first))
        assert spec.patterns == (Causal(),) * min(first, 3) + (Window.last(4),) * max(0, 3 - first)


def test_layer_types_that_say_nothing_new_are_taken():
    assert (
        spec_from_config(config_dict("llama", layer_types=["full_attention"] * 3)).patterns == (Causal(),) * 3
    )
    no_window = {"use_sliding_window": False, "sliding_window": None}
    assert spec_from_config(config_dict("mistral", **no_window)).patterns == (Causal(),) * 3


def test_a_mix_of_dtypes_is_widened_without_changing_a_value(tmp_path):
    model = build(SPEC, seed=0)
    save_folder(tmp_path / "m", model)
    file = tmp_path / "m" / "model.safetensors"
    stored = load_file(file)
    mixed = {name: tensor.bfloat16() if i % 2 else tensor for i, (name, tensor) in enumerate(stored.items())}
    save_file(mixed, file, metadata={"format": "pt"})
    loaded = load_model(tmp_path / "m").state_dict()
    assert all(
        loaded[name].dtype == torch.float32 and torch.equal(loaded[name], mixed[name].float())
        for name in mixed
    )
    assert any(not torch.equal(loaded[name], stored[name]) for name in mixed)
