"""Keys of `config.json`: typed access, and one table for reading and writing those that are fields of a spec.

Sizes that no model has are refused before anything of that size is allocated, even on the device "meta".
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from sys import float_info
from types import MappingProxyType
from typing import Any, NamedTuple

from headway.errors import CheckpointError, ConfigError, did_you_mean
from headway.models import ModelSpec
from headway.storage.reading import naming

OURS = "headway"
"""The `model_type` of a folder that transformers would misread, and the key of facts that it has no key for."""


class Inexpressible(ConfigError):
    """Raised for a property that a family's `config.json` has no key for; the message names it."""


class Key(NamedTuple):
    """The key (or keys) of config.json that hold a field of a spec.

    Attributes:
        names: the key, or several that must agree; none if the field follows from others, by `default`. A key of
            several fields is written from the first of them.
        default: the value that transformers uses if the key is absent, or a function that computes it from the fields
            read before. None: the key is required, unless its field is a bool.
        values: value of the key -> value of the field, if the two differ; for a key that is a bool, both.
        written: whether the key is written.
    """

    names: str | tuple[str, ...]
    default: Any = None
    values: Mapping[Any, Any] = MappingProxyType({})
    written: bool = True

    @property
    def each(self) -> tuple[str, ...]:
        """The names, as a tuple."""
        return (self.names,) if isinstance(self.names, str) else self.names


FieldMap = Mapping[str, Key]


def same_heads(fields: Mapping[str, Any]) -> int:
    """Returns the default of kv heads: as many as query heads."""
    heads: int = fields["heads"]
    return heads


def per_head(fields: Mapping[str, Any]) -> int:
    """Returns the default of the head size: width / heads. Raises ConfigError if that is not a whole number."""
    width, heads = fields["width"], fields["heads"]
    if width % heads:
        raise ConfigError(
            f"config.json: hidden_size {width} is not a multiple of num_attention_heads {heads}; set head_dim"
        )
    return int(width // heads)


def four_widths(fields: Mapping[str, Any]) -> int:
    """Returns the default of the feed-forward width in most older families: 4 * width."""
    return 4 * int(fields["width"])


FOUR_WIDTHS = Key((), four_widths)
SIZES: FieldMap = {
    "vocab": Key("vocab_size"),
    "width": Key("hidden_size"),
    "layers": Key("num_hidden_layers"),
    "heads": Key("num_attention_heads"),
    "hidden": Key("intermediate_size"),
    "init_std": Key("initializer_range", 0.02),
}
"""Keys that most families share. Sizes are required: transformers' defaults for them belong to no real model."""


def called(keys: FieldMap, **names: str) -> dict[str, Key]:
    """Returns the table with some of its fields under other key names: field -> key."""
    return {field: key._replace(names=names.get(field, key.names)) for field, key in keys.items()}


def without(keys: FieldMap, *fields: str) -> dict[str, Key]:
    """Returns the table without some fields."""
    return {field: key for field, key in keys.items() if field not in fields}


DECODER: FieldMap = {
    **SIZES,
    "attention_dropout": Key("attention_dropout", 0.0),
    "tied": Key("tie_word_embeddings"),
}
"""Keys that most newer decoders share."""
OLD_GELU = {"gelu_new": "gelu_pytorch_tanh"}
"""An activation's name in older families -> ours."""
KINDS = {f.name: f.type for f in fields(ModelSpec)}
ACTIVATIONS = {**OLD_GELU, "swish": "silu"}
"""Activations with another name than ours, in all families."""
MOST: Mapping[str, int] = {"layer": 10_000, "head": 65_536, "head_dim": 65_536}
"""Upper bounds by the end of a name (without its s), ours or a config's: layers, num_hidden_layers, n_layer; heads."""
MOST_ELSEWHERE = 2**31 - 1


def checked_sizes(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the fields of a `ModelSpec` unchanged. Raises ConfigError for whole numbers, in lists too, that are
    larger than any model's: 10,000 layers, 65,536 heads, 65,536 dims of a head, 2^31 - 1 for all else."""
    for name, value in fields.items():
        limit = next((n for end, n in MOST.items() if name.removesuffix("s").endswith(end)), MOST_ELSEWHERE)
        for size in value if isinstance(value, list | tuple) else (value,):
            if isinstance(size, int) and size > limit:
                raise ConfigError(f"config.json: {name} is {size:,}; at most {limit:,} is supported")
    return fields


Allowed = Mapping[str, tuple[Any, ...] | None]
"""Key -> values that are accepted, or None if any is."""


def check_keys(
    config: Mapping[str, Any], allowed: Allowed, *, place: str = "", of: str = "", empty: bool = False
) -> None:
    """Raises ConfigError for a key or value that is not allowed; with `empty`, null is an allowed value, and so are
    unknown keys that are null, false or empty.

    place: a prefix of the keys' names.   of: whose keys they are; both are for the message."""
    for key, value in config.items():
        if empty and (value is None or not (value or key in allowed)):
            continue
        if key not in allowed:
            raise ConfigError(
                f'config.json: unknown key "{place}{key}"{did_you_mean(key, allowed)}{of}; remove it if it does not '
                "change what the model computes"
            )
        values = allowed[key]
        if values is not None and value not in values:
            raise ConfigError(
                f'config.json: "{place}{key}" is {value!r}, which is unsupported{of}; accepted is '
                f"{' or '.join(map(repr, values))}"
            )


class ConfigReader:
    """Typed access to the keys of a config that begin with `prefix`, with the family's defaults for absent ones. `task`
    is the task of the head of the config's class."""

    def __init__(
        self, config: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "", task: str = "lm"
    ) -> None:
        self.config, self.defaults, self.prefix, self.task = config, defaults, prefix, task

    def below(self, prefix: str) -> "ConfigReader":
        """Returns a reader of the keys that begin with `prefix`, by the rest of their names."""
        return ConfigReader(self.config, self.defaults, prefix)

    def get(self, key: str) -> Any:
        key = self.prefix + key
        return self.config[key] if key in self.config else self.defaults.get(key)

    def need(self, key: str, default: Any = None) -> Any:
        value = self.get(key)
        if value is None and default is None:
            raise ConfigError(f'config.json lacks "{self.prefix}{key}"')
        return default if value is None else value

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.need(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "positive whole number" if least else "whole number from 0"
            raise self.wrong(key, f"a {kind}", value)
        checked_sizes({self.prefix + key: value})
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.need(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= float_info.max:
            raise self.wrong(key, "a number of at least 0", value)
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value not in (True, False, None):
            raise self.wrong(key, "true or false", value)
        return bool(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.need(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "text", value)
        return value

    def wrong(self, key: str, expected: str, value: object) -> ConfigError:
        """Returns the error for a value that is not the expected one."""
        return ConfigError(f'config.json: "{self.prefix}{key}" must be {expected}, got {value!r}')


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Converts ConfigErrors inside the `with` block to CheckpointErrors that name the file `path`."""
    try:
        yield
    except ConfigError as error:
        with naming(path):
            raise CheckpointError(str(error).removeprefix("config.json").lstrip(": ")) from error


def names(keys: FieldMap) -> tuple[str, ...]:
    """Returns all key names of a table."""
    return tuple(name for key in keys.values() for name in key.each)


def read_fields(config: ConfigReader, keys: FieldMap) -> dict[str, Any]:
    """Returns the fields of a table. Raises ConfigError for a key that is absent, of another type than its field, or
    contradicts another key of its field."""
    values: dict[str, Any] = {}
    for field, key in keys.items():
        if key.each:
            values[field] = _value(config, "bool" if True in key.values else KINDS[field], key, values)
        else:
            values[field] = key.default(values)
    return values


def _value(config: ConfigReader, kind: Any, key: Key, before: Mapping[str, Any]) -> Any:
    default = key.default(before) if callable(key.default) and config.get(key.each[0]) is None else None
    read: Mapping[str, Callable[[str], Any]] = {
        "int": lambda name: config.whole(name, default),
        "float": config.number,
        "float | None": lambda name: None if config.get(name) is None else config.number(name),
        "bool": config.flag,
        "str": lambda name: activation(config, name),
    }
    values = {name: read[kind](name) for name in key.each}
    if len(set(values.values())) > 1:
        given_values = ", ".join(f"{name} {value}" for name, value in values.items())
        raise ConfigError(f"config.json: {given_values}: these must be equal")
    value = values.popitem()[1]
    return key.values.get(value, value)


def write_fields(spec: ModelSpec, keys: FieldMap) -> dict[str, Any]:
    """Returns the config keys of a table, from a spec; reading them again shows what is lost."""
    config: dict[str, Any] = {}
    for field, key in keys.items():
        value = getattr(spec, field)
        if key.values:
            inverse = {meant: stored for stored, meant in key.values.items()}
            value = inverse.get(value, next(iter(key.values)) if True in key.values else value)
        for name in key.each if key.written else ():
            config.setdefault(name, value)
    return config


def activation(config: ConfigReader, key: str, default: str | None = None) -> str:
    """Returns an activation, by our name for it."""
    name = config.text(key, default)
    return ACTIVATIONS.get(name, name)
