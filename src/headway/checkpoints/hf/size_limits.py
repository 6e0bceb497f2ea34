"""Sizes that no model has, refused before anything of that size is made, not even on the device "meta"."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from headway.checkpoints.storage.lazy import LazyTensors
from headway.errors import CheckpointError, ConfigError
from headway.models import ModelSpec, cost

MOST: Mapping[str, int] = MappingProxyType({"layer": 10_000, "head": 65_536, "head_dim": 65_536})
"""By the end of a name, ours or a config's: layers, num_hidden_layers, n_layer; heads, num_attention_heads."""
MOST_ELSEWHERE = 2**31 - 1
Fields = TypeVar("Fields", bound=Mapping[str, object])


def checked_sizes(fields: Fields) -> Fields:
    """The same fields of a `ModelSpec`. Raises ConfigError for a whole number that is larger than any model's:
    10,000 layers, 65,536 heads, 65,536 dims of a head, 2^31 - 1 of all else."""
    for name, value in fields.items():
        most = next((n for end, n in MOST.items() if name.removesuffix("s").endswith(end)), MOST_ELSEWHERE)
        if isinstance(value, int) and value > most:
            raise ConfigError(f"config.json: {name} is {value:,}, and at most {most:,} are read")
    return fields


def check_stored(spec: ModelSpec, tensors: LazyTensors, path: Path) -> None:
    """Raise CheckpointError for a spec of more layers than there are tensors, or of 2^60 parameters and more:
    names and shapes of such a model cannot be listed."""
    if spec.layers > len(tensors):
        raise CheckpointError(
            f"{path}: config.json has {spec.layers:,} layers, but there are only {len(tensors):,} tensors"
        )
    if cost.parameter_count(spec) >= 2**60:
        raise CheckpointError(
            f"{path}: config.json has {cost.parameter_count(spec):.3g} parameters, but the weights are "
            f"{tensors.nbytes:,} bytes"
        )
