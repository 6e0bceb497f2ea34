"""Gemma 3n configs: the keys of published files, defaults, and what is refused."""

from typing import Any

import pytest

from headway.checkpoints import spec_from_config
from headway.errors import ConfigError
from headway.models.mixers import Softmax
from headway.nn.altup import AltUp
from headway.patterns import Causal, Window
from headway.positions import PerLayer
from tests.checkpoints.gemma3n_rows import CASES, FULL, SLIDING

SHARED: dict[str, Any] = {**CASES["gemma3n"][1], "model_type": "gemma3n_text"}
# the text_config of a published file, without keys that do not matter here
PUBLISHED: dict[str, Any] = {
    "model_type": "gemma3n_text", "vocab_size": 262400, "vocab_size_per_layer_input": 262144, "hidden_size": 2048,
    "hidden_size_per_layer_input": 256, "intermediate_size": [8192] * 30, "num_hidden_layers": 30, "laurel_rank": 64,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "num_kv_shared_layers": 10,
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "altup_active_idx": 0, "altup_coef_clip": 120.0,
    "altup_correct_scale": True, "altup_lr_multiplier": 1.0, "altup_num_inputs": 4, "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None,
    "rope_theta": 1000000.0, "sliding_window": 512, "max_position_embeddings": 32768,
    "layer_types": ([SLIDING] * 4 + [FULL]) * 6,
}  # fmt: skip


def test_a_config_in_the_keys_of_published_files() -> None:
    spec = spec_from_config(
        {"model_type": "gemma3n", "text_config": PUBLISHED, "vision_soft_tokens_per_image": 256}
    )
    assert (spec.layers, spec.hidden, spec.per_layer_vocab, spec.laurel) == (30, 8192, 262144, 64)
    assert spec.altup == AltUp()
    assert spec.mlp_sparsity == (0.95,) * 10 + (0.0,) * 20
    assert spec.patterns[3:5] == (Window.last(512), Causal())
    assert isinstance(spec.positions, PerLayer)
    assert [spec.positions.at(i).theta for i in (3, 4)] == [1e4, 1e6]  # type: ignore[attr-defined]
    assert spec.mixers[18:22] == (
        Softmax(v_norm=True),
        Softmax(v_norm=True),
        Softmax(kv_from=18),
        Softmax(kv_from=18),
    )
    assert spec.mixers[24] == Softmax(kv_from=19)


def test_what_files_leave_out_is_what_transformers_takes() -> None:
    config = {
        key: value for key, value in PUBLISHED.items() if key not in ("layer_types", "intermediate_size")
    }
    config |= {"num_hidden_layers": 35, "activation_sparsity_pattern": None, "num_kv_shared_layers": 15}
    spec = spec_from_config(config)
    assert (spec.hidden, {*spec.layer_hidden}) == (16384, {0})
    assert spec.mlp_sparsity == (0.95,) * 10 + (0.0,) * 25
    assert [i for i, pattern in enumerate(spec.patterns) if pattern == Causal()] == [4, 9, 14, 19, 24, 29, 34]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another stream": ({"altup_active_idx": 1}, "altup_active_idx"),
    "without its scale": ({"altup_correct_scale": False}, "altup_correct_scale"),
    "one stream": ({"altup_num_inputs": 1}, "altup_num_inputs"),
    "no clip": ({"altup_coef_clip": 0.0}, "clip must be a finite number above 0"),
    "shares of four layers": ({"activation_sparsity_pattern": [0.5] * 4}, "activation_sparsity_pattern must have one"),
    "a share of all": ({"activation_sparsity_pattern": [1.0] * 5}, "at least 0 and below 1"),
    "a share that is no number": ({"activation_sparsity_pattern": ["x"] * 5}, "at least 0 and below 1"),
    "widths of four layers": ({"intermediate_size": [28] * 4}, "intermediate_size must have one"),
    "a width that is no number": ({"intermediate_size": [28, "x", 28, 28, 28]}, "intermediate_size"),
    "more rows than ids": ({"vocab_size_per_layer_input": 62}, "62 is more than vocab_size 61"),
    "no embeddings by layer": ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input"),
    "no keys to share": ({"num_kv_shared_layers": 4, "layer_types": [SLIDING] * 4 + [FULL]}, "there is none"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_said(name: str) -> None:
    changes, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        spec_from_config({**SHARED, **changes})
