"""Gemma 4 configs: the keys of published files, unused tensors, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.checkpoints import spec_from_config
from headway.checkpoints.folder import load_folder
from headway.checkpoints.restore import load_model
from headway.errors import ConfigError
from headway.models.mixers import Softmax
from tests.checkpoints.decoders import IDS, theirs
from tests.checkpoints.edits import set_tensors
from tests.checkpoints.gemma4_rows import CASES, FULL, SLIDING
from tests.checkpoints.hf import off

E2B: dict[str, Any] = {**CASES["gemma4, e2b"][1], "model_type": "gemma4_text", "rms_norm_eps": 1e-6}


def test_sizes_of_published_files_are_those_of_saved_ones(tmp_path: Path) -> None:
    theirs("gemma4, e2b").save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "per_layer_config" in saved
    assert "global_head_dim" not in saved
    spec = load_folder(tmp_path).spec
    assert spec_from_config(E2B) == spec
    assert [head_dim for _, head_dim in spec.key_sizes] == [6, 6, 10, 6, 10]
    assert spec.mixers[3:] == (Softmax(kv_from=1), Softmax(kv_from=2))


@torch.no_grad()
def test_projections_of_keys_that_no_layer_reads_are_left_out(tmp_path: Path) -> None:
    """Published files contain them."""
    model = theirs("gemma4, e2b")
    model.save_pretrained(tmp_path)
    spare = {
        f"model.layers.4.self_attn.{name}.weight": torch.ones(20, 20)
        for name in ("k_proj", "v_proj", "k_norm")
    }
    set_tensors(tmp_path, lambda tensors: tensors.update(spare))
    assert {*load_folder(tmp_path).unused} == {*spare}
    assert off(load_model(tmp_path)(IDS), model(IDS).logits) < 1e-5


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts beside the feed-forward": ({"enable_moe_block": True}, "enable_moe_block"),
    "images that see both sides": ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    "another vocab": ({"vocab_size_per_layer_input": 60}, "must be equal"),
    "a last layer with a window": ({"layer_types": [FULL, SLIDING] * 2 + [SLIDING]}, "layer_types must end with"),
    "no keys to share": ({"num_kv_shared_layers": 4, "layer_types": [SLIDING] * 4 + [FULL]}, "there is none"),
    "more than there are": ({"num_kv_shared_layers": 9}, "there is none"),
    "keys of another size": ({"per_layer_config": {"2": {"head_dim": 10}}}, "there is none of the same sizes"),
    "another key by layer": ({"per_layer_config": {"2": {"sliding_window": 10}}}, "per_layer_config"),
    "a layer that is not there": ({"per_layer_config": {"7": {"head_dim": 10}}}, "per_layer_config"),
    "a share above 1": (
        {"rope_parameters": {FULL: {"rope_type": "proportional", "partial_rotary_factor": 1.5, "rope_theta": 10.0}}},
        "at most 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_said(name: str) -> None:
    changes, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        spec_from_config({**E2B, **changes})
