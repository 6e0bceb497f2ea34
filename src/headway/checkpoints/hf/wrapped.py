"""The text model of a multimodal folder: its config and its tensors; the other modules are left out.

On text alone these models compute what their text model does: the three position coordinates (Wang et al. 2024, section
2.1) are equal for text tokens, and attention is causal throughout.
"""

from collections.abc import Mapping
from typing import Any

from headway.checkpoints.hf.config_keys import check_keys
from headway.checkpoints.hf.harmless import HARMLESS
from headway.checkpoints.hf.layouts.base import ALWAYS
from headway.checkpoints.hf.rope import SCALINGS
from headway.errors import CheckpointError, ConfigError
from headway.storage.lazy import LazyTensors

TEXT: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "internvl": "qwen2",
    "lighton_ocr": "qwen3",
    **dict.fromkeys(("llava", "llava_next"), "llama"),
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), "qwen2"),
    "qwen3_vl": "qwen3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""`model_type` -> that of its text model, unless `text_config` names another."""
SAME = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""`model_type` of a text model -> that of the family that is identical to it."""
SIZES: Mapping[str, Mapping[str, int]] = {"gemma3_text": {"vocab_size": 262208, "num_attention_heads": 8}}
"""Sizes that published files leave out: transformers' defaults."""
AXES = ("mrope_section", "mrope_interleaved")
OF_IMAGES = (
    "vision_config", "vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio",
    "vision_token_id", "vision_start_token_id", "vision_end_token_id", "image_token_id", "image_token_index",
    "image_seq_length", "image_grid_pinpoints", "boi_token_index", "eoi_token_index", "video_token_id",
    "video_token_index", "mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_act",
    "spatial_merge_size", "downsample_ratio", "use_image_newline_parameter", "ignore_index", "audio_config",
    "audio_token_id", "boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index",
    "audio_soft_tokens_per_image", "vision_soft_tokens_per_image",
)  # fmt: skip
"""Keys of the modules around the text model (vision, audio)."""
BESIDE = (*ALWAYS, *HARMLESS, *OF_IMAGES, "text_config", "tie_word_embeddings", "initializer_range")
"""Keys that are allowed beside `text_config`; so are those that repeat a value in it."""
PLACES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Prefix of the text model's tensor names -> the prefix in its own files."""
AROUND = (
    "audio_tower.",
    "embed_audio.",
    "embed_vision.",
    "vision_tower.",
    "vision_encoder.",
    "vision_projection.",
    "visual.",
    "multi_modal_projector.",
    "image_newline",
)
"""Prefixes of the other modules' tensor names, with or without a leading "model."."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config of the text model, or the config itself if the folder is not multimodal. Raises ConfigError
    for a `text_config` that is not an object, and for an unknown key beside it."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in TEXT:
        return config
    inner = config.get("text_config")
    if inner is None:  # old files have the keys of the text model at the top level
        inner = {key: value for key, value in config.items() if key not in (*OF_IMAGES, "text_config")}
        inner |= {"model_type": None, "architectures": None}
    if not isinstance(inner, Mapping):
        raise ConfigError(f'config.json: "text_config" must be an object, got {inner!r}')
    beside = {key: value for key, value in config.items() if key not in inner or value != inner[key]}
    allowed = {**dict.fromkeys(BESIDE), "is_encoder_decoder": (False, None)}
    check_keys(beside, allowed, of=f' beside "text_config" of model_type {kind}')
    name = inner.get("model_type") or TEXT[kind]
    name = SAME.get(name, name)
    text: dict[str, Any] = {**SIZES.get(name, {}), **inner, "model_type": name, "architectures": None}
    ties = [
        source["tie_word_embeddings"]
        for source in (config, inner)
        if source.get("tie_word_embeddings") is not None
    ]
    if ties:  # either may hold the value; a false in the other is only the default
        text["tie_word_embeddings"] = next((tie for tie in ties if tie is not False), False)
    for key in SCALINGS:
        if isinstance(values := text.get(key), Mapping):
            text[key] = {
                part: "default" if value == "mrope" else value
                for part, value in values.items()
                if part not in AXES
            }
    return text


def text_tensors(config: Mapping[str, Any], tensors: LazyTensors) -> tuple[LazyTensors, tuple[str, ...]]:
    """Returns the text model's tensors under the names of its own files, and the names of the others. Raises
    CheckpointError for two names of one tensor."""
    if config.get("model_type") not in TEXT:
        return tensors, ()
    names: dict[str, str] = {}
    around = tuple(name for name in tensors if name.removeprefix("model.").startswith(AROUND))
    for old in (name for name in tensors if name not in around):
        new = next((b + old.removeprefix(a) for a, b in PLACES.items() if old.startswith(a)), old)
        if new in names:
            raise CheckpointError(f"{old} and {names[new]} are two names of one tensor; remove one")
        names[new] = old
    return tensors.renamed(names), around
