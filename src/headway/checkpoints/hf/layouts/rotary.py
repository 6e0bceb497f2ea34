"""Rotary positions in `config.json` of families that may rotate a share of each head only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader
from headway.checkpoints.hf.rope import Rope, read_rope, write_rope
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.positions import Rotary

PARTIAL = "partial_rotary_factor"
ROPE = (
    "max_position_embeddings",
    "original_max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)


def rope_parameters(given: ConfigReader) -> Mapping[str, Any]:
    """What `rope_parameters` holds, {} where there are none. Raises ConfigError for what is no object."""
    found = given.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f'config.json: "rope_parameters" must be an object, got {found!r}')
    return found


def read_partial(given: ConfigReader, share: float, head_dim: int, **more: Any) -> Rope:
    """Rotary positions that rotate a share of each head, unless `rope_parameters` give another; `more` are keys of a
    config that `read_rope` knows."""
    config: dict[str, Any] = {**given.config, **more}
    parameters = rope_parameters(given)
    share = ConfigReader(parameters, {}).number(PARTIAL, share)
    if share > 1:
        raise ConfigError(f"config.json: {share:g} of each head is to be rotated, and at most 1 can be")
    config["rope_parameters"] = {k: v for k, v in parameters.items() if k != PARTIAL} or None
    rope = read_rope(config, max_positions=given.whole("max_position_embeddings"), head_dim=head_dim)
    dims = int(head_dim * share)
    return replace(rope, rotary=replace(rope.rotary, dims=None if dims == head_dim else dims))


def write_rotary(spec: ModelSpec) -> dict[str, Any]:
    """The keys of rotary positions; of the usual ones where there are others, which reading will notice."""
    return write_rope(_rotary(spec), spec.trained_context)


def write_partial(spec: ModelSpec) -> tuple[dict[str, Any], float]:
    """The keys that `read_partial` reads, and the share."""
    share = _rotary(spec).rotated_dims(spec.head_dim) / spec.head_dim
    keys = write_rotary(spec)
    return {**keys, "rope_parameters": {**keys["rope_parameters"], PARTIAL: share}}, share


def _rotary(spec: ModelSpec) -> Rotary:
    return spec.positions if isinstance(spec.positions, Rotary) else Rotary(pairing="halves")
