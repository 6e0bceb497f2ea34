"""Config keys of transformers that are fields of a spec under another name: one table, read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from headway.checkpoints.hf.config_reader import ConfigReader
from headway.errors import ConfigError
from headway.models import ModelSpec

FieldMap = Mapping[str, str | tuple[str, ...]]
"""Field of `ModelSpec` -> its key, or several keys that must agree. Where one key stands for several fields, it is
written from the first."""

KINDS = {f.name: f.type for f in fields(ModelSpec)}
ACTIVATIONS = {"gelu_new": "gelu_pytorch_tanh", "swish": "silu"}
"""Activations that have another name here."""


def names(keys: FieldMap) -> tuple[str, ...]:
    """All keys of a table."""
    return tuple(name for key in keys.values() for name in ((key,) if isinstance(key, str) else key))


def read_fields(given: ConfigReader, keys: FieldMap) -> dict[str, Any]:
    """The fields of a table. Raises ConfigError for a key that is absent, of another type than its field, or
    contradicts its like."""
    return {field: _value(given, KINDS[field], key) for field, key in keys.items()}


def _value(given: ConfigReader, kind: Any, key: str | tuple[str, ...]) -> Any:
    if not isinstance(key, str):
        return one_number(given, *key)
    if kind == "str":
        return activation(given, key)
    read: Mapping[str, Callable[[str], Any]] = {"int": given.whole, "float": given.number, "bool": given.flag}
    return read[kind](key)


def write_fields(spec: ModelSpec, keys: FieldMap) -> dict[str, Any]:
    """The keys of a table; what they cannot say is noticed by reading them again."""
    found: dict[str, Any] = {}
    for field, key in keys.items():
        for name in names({field: key}):
            found.setdefault(name, getattr(spec, field))
    return found


def activation(given: ConfigReader, key: str) -> str:
    """The name here of an activation."""
    name = given.text(key)
    return ACTIVATIONS.get(name, name)


def gelu_new(name: str) -> str:
    """An activation's name in the families that are older than "gelu_pytorch_tanh"."""
    return "gelu_new" if name == "gelu_pytorch_tanh" else name


def one_number(given: ConfigReader, *keys: str) -> float:
    """The number that all these keys have. Raises ConfigError where they differ, since a spec has one for all."""
    values = {key: given.number(key) for key in keys}
    if len(set(values.values())) > 1:
        said = ", ".join(f"{key} {value}" for key, value in values.items())
        raise ConfigError(f"config.json: {said}: headway has one number for these; make them equal")
    return next(iter(values.values()))
