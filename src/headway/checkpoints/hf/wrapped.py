"""The text model of a folder that reads images, too: its config and its tensors; what stands around it is left out.

Of text alone these models compute what their text model does: positions of three axes (Wang et al. 2024, section 2.1)
are equal there, and nothing sees both sides.
"""

from collections.abc import Mapping
from typing import Any

from headway.errors import CheckpointError, ConfigError
from headway.storage.lazy import LazyTensors

TEXT: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "internvl": "qwen2",
    "lighton_ocr": "qwen3",
    **dict.fromkeys(("llava", "llava_next"), "llama"),
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), "qwen2"),
    "qwen3_vl": "qwen3",
    "qwen3_5": "qwen3_5_text",
}
"""`model_type` -> that of its text model, unless `text_config` says another."""
SAME = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Text models that have a name of their own, and are another."""
SIZES: Mapping[str, Mapping[str, int]] = {"gemma3_text": {"vocab_size": 262208, "num_attention_heads": 8}}
"""Sizes that published files leave out, as transformers has them."""
SCALINGS = ("rope_scaling", "rope_parameters")
AXES = ("mrope_section", "mrope_interleaved")
PLACES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""How names of the text model's tensors begin -> how they begin in its own files."""
AROUND = (
    "vision_tower.",
    "vision_encoder.",
    "vision_projection.",
    "visual.",
    "multi_modal_projector.",
    "image_newline",
)
"""How names of the others begin, perhaps behind "model."."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text model; of a folder that has no other the config itself. Raises ConfigError for a
    `text_config` that is no object."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in TEXT:
        return config
    inner = config.get("text_config")
    if inner is None:  # old files have its keys beside the others
        inner = {
            key: value for key, value in config.items() if not key.startswith(("vision", "image", "video"))
        }
        inner |= {"model_type": None, "architectures": None}
    if not isinstance(inner, Mapping):
        raise ConfigError(f'config.json: "text_config" must be an object, got {inner!r}')
    name = inner.get("model_type") or TEXT[kind]
    name = SAME.get(name, name)
    text: dict[str, Any] = {**SIZES.get(name, {}), **inner, "model_type": name, "architectures": None}
    ties = [
        one["tie_word_embeddings"] for one in (config, inner) if one.get("tie_word_embeddings") is not None
    ]
    if ties:  # either says it, and the other's false is what was not said
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
    """The text model's tensors under the names of its own files, and the names of the others. Raises CheckpointError
    for two names of one tensor."""
    if config.get("model_type") not in TEXT:
        return tensors, ()
    names: dict[str, str] = {}
    around = tuple(name for name in tensors if name.removeprefix("model.").startswith(AROUND))
    for old in (name for name in tensors if name not in around):
        new = next((b + old.removeprefix(a) for a, b in PLACES.items() if old.startswith(a)), old)
        if new in names:
            raise CheckpointError(f"{old} and {names[new]} are two names of one tensor; drop one")
        names[new] = old
    return tensors.renamed(names), around
