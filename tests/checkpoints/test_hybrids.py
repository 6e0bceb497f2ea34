"""Folders of models whose layers mix tokens in different ways, beyond what all decoders are tested for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from headway.checkpoints import config_from_spec, spec_from_config
from headway.checkpoints.folder import load_folder
from headway.checkpoints.heads import change_pairing, repeat_kv_heads
from headway.checkpoints.restore import fill, load_model
from headway.checkpoints.saving import save_folder
from headway.models import build
from headway.surgery import pool_heads
from tests.checkpoints.decoder_sizes import FALCON_H1, FALCON_H1_FACTORS, QWEN3_5
from tests.checkpoints.decoders import IDS, theirs
from tests.checkpoints.expert_rows import NEXT
from tests.checkpoints.hf import off
from tests.models.mixers import SPECS

VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip


def whole(kind: str = "qwen3_5", **settings: Any) -> Any:
    """Returns a model of images and text whose weights have standard deviation 0.3."""
    text = {**(QWEN3_5 if kind == "qwen3_5" else NEXT), "num_hidden_layers": 4}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=VISION, **settings)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "tied", "old"),
    [
        ("qwen3_5", False, True),
        ("qwen3_5", True, True),
        ("qwen3_5_moe", False, True),
        ("qwen3_5_moe", True, False),
    ],
)
@torch.no_grad()
def test_the_text_model_of_a_folder_of_images_and_texts(
    kind: str, tied: bool, old: bool, tmp_path: Path
) -> None:
    """Experts are stored as matrices of their own, as transformers writes by default, or as two tensors of a layer."""
    model = whole(kind, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "whole", save_original_format=old)
    folder = load_folder(tmp_path / "whole")
    assert folder.unused
    assert all(name.startswith("model.visual.") for name in folder.unused)
    ours = load_model(tmp_path / "whole")
    assert any(name.endswith("experts.gate_up_proj") for name in folder.stored) == (not old)
    assert (ours.spec.family, ours.spec.tied) == (f"{kind}_text", tied)
    expected = model(input_ids=IDS).logits
    assert off(ours(IDS), expected) < 1e-5
    save_folder(tmp_path / "text", ours)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "text", attn_implementation="eager").eval()
    assert off(reloaded(IDS).logits, expected) < 1e-5


@pytest.mark.parametrize("name", ["delta + full", "linear + delta + full"])
@torch.no_grad()
def test_what_is_done_with_queries_and_keys_leaves_other_layers_alone(name: str) -> None:
    spec = SPECS[name]
    model = build(spec, seed=0, dtype=torch.float64).eval()
    state, expected = model.state_dict(), model(IDS)
    turned, adjacent = change_pairing(state, spec, "adjacent")
    assert (fill(adjacent, turned, dtype=torch.float64)(IDS) - expected).abs().max() < 1e-12
    repeated, wide = repeat_kv_heads(state, spec, 4)
    assert (fill(wide, repeated, dtype=torch.float64)(IDS) - expected).abs().max() < 1e-12
    narrow, pooled = pool_heads(wide, repeated, 2)
    assert (fill(narrow, pooled, dtype=torch.float64)(IDS) - expected).abs().max() < 1e-12


@torch.no_grad()
def test_nemotron_h_s_experts_in_two_tensors_of_a_layer(tmp_path: Path) -> None:
    """They are read as transformers' module holds them, and written as published files have them."""
    model = theirs("nemotron-h, experts, biases")
    model.save_pretrained(tmp_path / "own", save_original_format=False)
    assert "model.layers.1.mixer.experts.up_proj" in load_folder(tmp_path / "own").stored
    ours = load_model(tmp_path / "own")
    assert off(ours(IDS), model(IDS).logits) < 1e-5
    save_folder(tmp_path / "ours", ours)
    assert "backbone.layers.1.mixer.experts.0.up_proj.weight" in load_folder(tmp_path / "ours").stored


def test_factors_of_falcon_h1_that_mean_the_same_are_one() -> None:
    config = {**FALCON_H1, **FALCON_H1_FACTORS, "model_type": "falcon_h1", "attention_in_multiplier": 0.3}
    spec = spec_from_config({**config, "ssm_in_multiplier": 1.7})
    written = config_from_spec(spec)
    assert (written["attention_in_multiplier"], written["ssm_in_multiplier"]) == (1.0, 1.0)
    assert written["key_multiplier"] == pytest.approx(0.3 * 0.3 * 0.6)
    assert written["attention_out_multiplier"] == pytest.approx(0.3 * 0.8)
    assert written["ssm_multipliers"] == pytest.approx(
        [1.7 * factor for factor in (0.5, 1.5, 0.75, 1.25, 0.9)]
    )
    assert spec_from_config(written) == spec
