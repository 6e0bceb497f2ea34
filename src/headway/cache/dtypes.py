"""What a cache can be asked to store, by name."""

from __future__ import annotations

import torch

from headway.errors import ConfigError, did_you_mean

KV_DTYPES: dict[str, torch.dtype | None] = {"auto": None, "int8": torch.int8}
"""auto: the numbers as the model makes them. int8: rounded, a scale per token and kv head (docs/caches.md)."""


def kv_dtype(name: str) -> torch.dtype | None:
    """The dtype of that name, None for the model's own. Raises ConfigError, with the names that there are."""
    if not isinstance(name, str) or name not in KV_DTYPES:
        raise ConfigError(
            f"kv_cache_dtype: {name!r} is unknown{did_you_mean(str(name), KV_DTYPES)}; there are {', '.join(KV_DTYPES)}"
        )
    return KV_DTYPES[name]
