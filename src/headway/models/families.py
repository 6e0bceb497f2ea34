"""The families of decoders that differ by a few switches: data, not classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """What is so in every model of a family, and what is so unless said otherwise.

    Attributes:
        about: one line.
        defaults: fields of `ModelSpec` that need not be given.
        theta: of the rotary positions, unless given.
    """

    about: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    theta: float = 10000.0


FAMILIES: Mapping[str, Family] = {
    "llama": Family("pre-norm RMSNorm, rotary positions, SwiGLU; LLaMA 1, 2 and 3"),
    "mistral": Family(
        "llama with a sliding window in all layers, or in none",
        {"norm_eps": 1e-5, "trained_context": 32768},
    ),
    "ministral": Family(
        "llama with a window or none, layer by layer",
        {"norm_eps": 1e-5, "trained_context": 32768},
    ),
    "qwen2": Family(
        "llama with biases on queries, keys and values, and windows by layer",
        {"qkv_bias": True, "trained_context": 32768},
        theta=1e6,
    ),
    "qwen3": Family(
        "llama with normed queries and keys, a free head_dim, and windows by layer",
        {"qk_norm": True, "trained_context": 40960},
        theta=1e6,
    ),
}
