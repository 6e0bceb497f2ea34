"""Published sizes by name: facts about models, without their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError, did_you_mean
from headway.models.spec import ModelSpec
from headway.patterns import Causal, Window
from headway.positions import Llama3, Rotary

Fields = Mapping[str, Any]


def _sizes(width: int, layers: int, heads: int, kv_heads: int, hidden: int, **more: Any) -> dict[str, Any]:
    return {
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "hidden": hidden,
        **more,
    }


_LLAMA_1 = {"family": "llama", "vocab": 32000, "norm_eps": 1e-6, "trained_context": 2048}
_LLAMA_2 = {"family": "llama", "vocab": 32000, "norm_eps": 1e-5, "trained_context": 4096}
_LLAMA_3 = {
    "family": "llama",
    "vocab": 128256,
    "norm_eps": 1e-5,
    "trained_context": 8192,
    "positions": Rotary(500000.0, pairing="halves"),
}
_LLAMA_31 = {
    **_LLAMA_3,
    "trained_context": 131072,
    "positions": Rotary(500000.0, pairing="halves", scaling=Llama3(8.0, 1.0, 4.0, 8192)),
}
_LLAMA_32 = {
    **_LLAMA_31,
    "tied": True,
    "positions": Rotary(500000.0, pairing="halves", scaling=Llama3(32.0, 1.0, 4.0, 8192)),
}
_MISTRAL = {"family": "mistral", "vocab": 32000, "trained_context": 32768, "patterns": Window.last(4096)}
_QWEN_2 = {"family": "qwen2", "vocab": 151936, "trained_context": 131072, "tied": True}
_QWEN_3 = {"family": "qwen3", "vocab": 151936, "trained_context": 40960, "tied": True, "head_dim": 128}

_CATALOG: Mapping[str, Fields] = {
    "llama-1-7b": {**_LLAMA_1, **_sizes(4096, 32, 32, 32, 11008)},
    "llama-1-13b": {**_LLAMA_1, **_sizes(5120, 40, 40, 40, 13824)},
    "llama-1-33b": {**_LLAMA_1, **_sizes(6656, 60, 52, 52, 17920)},
    "llama-1-65b": {**_LLAMA_1, **_sizes(8192, 80, 64, 64, 22016, norm_eps=1e-5)},
    "llama-2-7b": {**_LLAMA_2, **_sizes(4096, 32, 32, 32, 11008)},
    "llama-2-13b": {**_LLAMA_2, **_sizes(5120, 40, 40, 40, 13824)},
    # Never released; the sizes are those of Code Llama 34B, which was trained from it.
    "llama-2-34b": {**_LLAMA_2, **_sizes(8192, 48, 64, 8, 22016)},
    "llama-2-70b": {**_LLAMA_2, **_sizes(8192, 80, 64, 8, 28672)},
    "llama-3-8b": {**_LLAMA_3, **_sizes(4096, 32, 32, 8, 14336)},
    "llama-3-70b": {**_LLAMA_3, **_sizes(8192, 80, 64, 8, 28672)},
    "llama-3.1-8b": {**_LLAMA_31, **_sizes(4096, 32, 32, 8, 14336)},
    "llama-3.1-70b": {**_LLAMA_31, **_sizes(8192, 80, 64, 8, 28672)},
    "llama-3.2-1b": {**_LLAMA_32, **_sizes(2048, 16, 32, 8, 8192)},
    "llama-3.2-3b": {**_LLAMA_32, **_sizes(3072, 28, 24, 8, 8192)},
    "mistral-7b": {**_MISTRAL, **_sizes(4096, 32, 32, 8, 14336)},
    "mistral-7b-v0.3": {
        **_MISTRAL,
        **_sizes(4096, 32, 32, 8, 14336),
        "vocab": 32768,
        "patterns": Causal(),
        "positions": Rotary(1e6, pairing="halves"),
    },
    "qwen2-0.5b": {**_QWEN_2, **_sizes(896, 24, 14, 2, 4864)},
    "qwen2-1.5b": {**_QWEN_2, **_sizes(1536, 28, 12, 2, 8960)},
    "qwen2-7b": {**_QWEN_2, **_sizes(3584, 28, 28, 4, 18944, vocab=152064, tied=False)},
    "qwen3-0.6b": {**_QWEN_3, **_sizes(1024, 28, 16, 8, 3072)},
    "qwen3-1.7b": {**_QWEN_3, **_sizes(2048, 28, 16, 8, 6144)},
    "qwen3-4b": {**_QWEN_3, **_sizes(2560, 36, 32, 8, 9728)},
    "qwen3-8b": {**_QWEN_3, **_sizes(4096, 36, 32, 8, 12288, tied=False)},
}


def names() -> tuple[str, ...]:
    """All names of the catalog."""
    return tuple(_CATALOG)


def spec(name: str) -> ModelSpec:
    """The spec of that name, upper or lower case. Raises ConfigError for a name that is not there."""
    fields = _CATALOG.get(name.lower())
    if fields is None:
        raise ConfigError(
            f"the catalog has no model {name!r}{did_you_mean(name.lower(), _CATALOG)}; "
            f"it has {', '.join(_CATALOG)}"
        )
    rest = dict(fields)
    return ModelSpec.of(rest.pop("family"), **rest)
