"""Folders of models that also read images: their text model loads, and gives transformers' logits for text."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from headway.checkpoints import save_folder, spec_from_config
from headway.checkpoints.folder import load_folder
from headway.checkpoints.hf.config_keys import check_keys
from headway.checkpoints.hf.wrapped import BESIDE, TEXT
from headway.checkpoints.restore import build_model
from headway.errors import CheckpointError, ConfigError
from tests.checkpoints import gemma4_rows
from tests.checkpoints.decoder_sizes import LLAMA, MINISTRAL, YARN
from tests.checkpoints.decoders import IDS
from tests.checkpoints.hf import off
from tests.pairwise import chequered

TEXTS: dict[str, Any] = {**LLAMA, "head_dim": 8}
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN: dict[str, Any] = {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 2}
AXES = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1]}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {"text_config": {**TEXTS, "sliding_window": 5, "query_pre_attn_scalar": 24}, "vision_config": VISION,
         "mm_tokens_per_image": 4},
    ),
    "gemma4": (
        "gemma4",
        "gemma4_text",
        {"text_config": {**gemma4_rows.CASES["gemma4, e2b"][1], "use_bidirectional_attention": "vision",
                         "pad_token_id": 0},
         "vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 8}},
    ),
    "mistral3": (
        "mistral3",
        "mistral",
        {"text_config": {**TEXTS, "model_type": "mistral", "sliding_window": 5}, "tie_word_embeddings": False,
         "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8}},
    ),
    "mistral3 of ministral3": (
        "mistral3",
        "ministral3",
        {"text_config": {**TEXTS, "model_type": "ministral3", "rope_parameters": {**YARN, **MINISTRAL}},
         "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8}},
    ),
    "llava": (
        "llava",
        "llama",
        {"text_config": {**TEXTS, "model_type": "llama"},
         "vision_config": {**VISION, "model_type": "clip_vision_model"}},
    ),
    "qwen2_vl": ("qwen2_vl", "qwen2", {"text_config": {**LLAMA, "rope_parameters": AXES}, "vision_config": QWEN}),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        "qwen2",
        {"text_config": {**LLAMA, "rope_parameters": AXES}, "tie_word_embeddings": True,
         "vision_config": {**QWEN, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 48,
                           "fullatt_block_indexes": [0]}},
    ),
    "qwen3_vl": (
        "qwen3_vl",
        "qwen3",
        {"text_config": {**TEXTS, "rope_parameters": {**AXES, "mrope_interleaved": True}},
         "vision_config": {**QWEN, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 48,
                           "deepstack_visual_indexes": [0], "num_position_embeddings": 16}},
    ),
}  # fmt: skip
"""Maps the name of each case to its `model_type`, the family of its text model, and its config."""


def theirs(name: str) -> Any:
    kind, _, settings = CASES[name]
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(kind, **settings), attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, p in model.named_parameters():
            gain = key.endswith("weight") and p.dim() == 1 and kind != "gemma3"
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + gain)
    return model.eval()


@chequered("name,old", list(CASES), [True, False])
@torch.no_grad()
def test_text_is_read_as_they_read_it(name: str, old: bool, tmp_path: Path) -> None:
    """Tensors may have the names of current files, or those of published ones."""
    model = theirs(name)
    model.save_pretrained(tmp_path / "theirs", save_original_format=old)
    folder = load_folder(tmp_path / "theirs")
    assert folder.spec.family == CASES[name][1]
    image_tensors = {
        key for key in folder.stored if any(part in key for part in ("visual", "vision", "projector"))
    }
    assert {*folder.unused} == image_tensors != set()
    ours, expected = build_model(folder), model(input_ids=IDS).logits
    assert off(ours(IDS), expected) < 1e-5
    save_folder(tmp_path / "ours", ours)
    text_model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert text_model.config.model_type == folder.spec.family
    assert off(text_model(IDS).logits, expected) < 1e-5


def test_every_kind_that_is_read_is_one_of_theirs() -> None:
    for kind, text in TEXT.items():
        inner = AutoConfig.for_model(kind).get_text_config()
        assert inner.model_type in (text, f"{kind}_text"), kind


def test_keys_beside_each_other_and_sizes_that_are_left_out() -> None:
    flat = {**LLAMA, "model_type": "qwen2_vl", "vision_config": QWEN, "image_token_id": 7, "rms_norm_eps": 1e-6,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}  # fmt: skip
    nested = {"model_type": "qwen2_vl", "text_config": {**LLAMA, "rms_norm_eps": 1e-6}}
    assert spec_from_config(flat) == spec_from_config(nested)
    partial = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "sliding_window": 5}
    spec = spec_from_config({"model_type": "gemma3", "text_config": {**partial, "rms_norm_eps": 1e-6}})
    config = AutoConfig.for_model("gemma3", text_config=partial).text_config
    assert (spec.vocab, spec.heads, spec.kv_heads, spec.head_dim, spec.tied) == (
        *(config.vocab_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim),
        config.tie_word_embeddings,
    )


def test_keys_around_the_text_model_are_known_ones() -> None:
    """Keys of `text_config` may be repeated beside it, and keys for images may stand there."""
    text = {**LLAMA, "rms_norm_eps": 1e-6}
    nested = {"model_type": "qwen2_vl", "text_config": text, "vision_config": QWEN, "image_token_id": 7}
    assert spec_from_config({**nested, **text, "torch_dtype": "bfloat16"}) == spec_from_config(nested)
    for key, value in {"vision_configs": {}, "use_sliding_windows": True, "hidden_size": 64}.items():
        with pytest.raises(
            ConfigError, match=rf'unknown key "{key}".* beside "text_config" of model_type qwen2_vl'
        ):
            spec_from_config({**nested, key: value})
    with pytest.raises(ConfigError, match=r'unknown key "image_tokens" .*for model_type qwen2;'):
        spec_from_config({"model_type": "qwen2_vl", **text, "image_tokens": 7})


def test_every_key_around_of_theirs_is_known() -> None:
    for kind in TEXT:
        config = AutoConfig.for_model(kind).to_dict()
        check_keys({key: value for key, value in config.items() if value}, dict.fromkeys(BESIDE))


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='"text_config" must be an object'):
        spec_from_config({"model_type": "gemma3", "text_config": 3})
    with pytest.raises(ConfigError, match='unknown key "hiden_size"'):
        spec_from_config({"model_type": "gemma3", "text_config": {"hiden_size": 3}})
    with pytest.raises(ConfigError, match="no model_type 'dbrx'"):
        spec_from_config({"model_type": "llava", "text_config": {"model_type": "dbrx"}})
    theirs("llava").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    stored_name = next(key for key in stored if key.endswith("lm_head.weight"))
    other_name = "lm_head.weight" if stored_name != "lm_head.weight" else "language_model.lm_head.weight"
    save_file({**stored, other_name: stored[stored_name].clone()}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="two names of one tensor"):
        load_folder(tmp_path)
