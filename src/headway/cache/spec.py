"""Specifications of what a cache stores: keys and values, or states."""

import math
from dataclasses import dataclass

import torch

from headway.errors import CacheError, check_known
from headway.partial import work_dtype

KV_DTYPES: dict[str, torch.dtype | None] = {"auto": None, "int8": torch.int8}
"""auto: the dtype of the model's keys. int8: rounded, with a scale per token and kv head (docs/caches.md)."""


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Shape, dtype and device of what the cache of one layer stores.

    Attributes:
        kv_heads: number of key/value heads, K; several query heads may share one.
        head_dim: size of a key, D.
        value_dim: size of a value, E; D unless given.
        dtype, device: of the stored tensors. torch.int8 accepts keys of any floating-point dtype and rounds them, with
            a float32 scale per token and kv head (`headway.quantization`).

    Raises CacheError for sizes that are not positive, and for dtypes that cannot store keys.
    """

    kv_heads: int
    head_dim: int
    value_dim: int | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        sizes = {"kv_heads": self.kv_heads, "head_dim": self.head_dim, "value_dim": self.value_size}
        bad = [f"{name}={n}" for name, n in sizes.items() if n < 1]
        if bad:
            raise CacheError(f"CacheSpec: sizes must be positive, got {', '.join(bad)}")
        if not (self.dtype.is_floating_point or self.dtype == torch.int8):
            raise CacheError(
                f"CacheSpec: dtype must be a floating-point dtype or torch.int8, got {self.dtype}"
            )

    @property
    def value_size(self) -> int:
        """Size of a value, E."""
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True)
class StateSpec:
    """The recurrent state that a layer keeps of a sequence in place of keys and values: tensors whose size does not
    depend on the length, zeros before the first token.

    of: what defines their meaning, such as a `LinearAttentionSpec`; a cache fits layers with an equal one.
    tensors: shape and dtype of each tensor.
    """

    of: object
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of states beside keys of `dtype`: float32, or float64 for float64."""
    return work_dtype(dtype)


def kv_dtype(name: str) -> torch.dtype | None:
    """Returns the dtype of a name in `KV_DTYPES`, None for the model's own. Raises ConfigError for an unknown name."""
    check_known(name, KV_DTYPES, "kv_cache_dtype: there is no")
    return KV_DTYPES[name]
