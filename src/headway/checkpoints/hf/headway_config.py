"""The key "headway" of `config.json`: facts that transformers has no key for.

In a folder of a known family it adds a few facts to the family's own keys (`FACTS`). In a folder of
model_type "headway", which transformers refuses rather than misreads, it holds the whole spec, field by
field.
"""

from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, get_args, get_type_hints

from headway.checkpoints.hf.config_keys import OURS, checked_sizes
from headway.errors import ConfigError, as_error, check_known, did_you_mean
from headway.models import Head, ModelSpec
from headway.models.mixers import MIXERS
from headway.nn import Experts
from headway.patterns import Pattern, parse
from headway.positions import PositionScheme, Scaling

FORMAT = 3
FACTS: Mapping[str, tuple[type, ...]] = {
    "family": (str,),
    "trained_context": (int,),
    "max_context": (int, type(None)),
}


def _kinds() -> dict[str, type[Any]]:
    """By the name of the class, which `kind` is: position schemes, scalings and mixers, those of other packages
    included once they are imported, and what else a spec holds."""
    schemes = (*_subclasses(PositionScheme), *_subclasses(Scaling))
    found = (*schemes, *MIXERS, Head, ModelSpec, Experts)
    return {kind.__name__: kind for kind in found}


def _subclasses(kind: type[Any]) -> list[type[Any]]:
    return [one for below in kind.__subclasses__() for one in (below, *_subclasses(below))]


def own_facts(config: Mapping[str, Any], known: Mapping[str, tuple[type, ...]] = FACTS) -> dict[str, Any]:
    """The facts in a known family's config, `known` by their types. Raises ConfigError for one that is unknown or of
    another type."""
    facts = config.get(OURS)
    if facts is None:
        return {}
    if not isinstance(facts, Mapping):
        raise ConfigError(f'config.json: "{OURS}" must be an object, got {facts!r}')
    for key, value in facts.items():
        check_known(key, known, f"config.json: {OURS} has no key")
        if type(value) not in known[key]:
            raise ConfigError(f'config.json: "{OURS}.{key}" must be {known[key][0].__name__}, got {value!r}')
    return dict(facts)


def spec_from_own(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a folder of model_type "headway". Raises ConfigError for unknown, missing or malformed
    fields."""
    facts = config.get(OURS)
    if not isinstance(facts, Mapping):
        raise ConfigError(
            f'config.json: model_type "{OURS}" needs the key "{OURS}" with the fields of the spec'
        )
    facts = dict(facts)
    if (version := facts.pop("format", None)) != FORMAT:
        raise ConfigError(
            f"config.json: headway.format is {version!r}; this version of headway reads {FORMAT}"
        )
    known = [f.name for f in fields(ModelSpec) if f.init]
    for key in facts:
        check_known(key, known, f"config.json: {OURS} has no key")
    with as_error(ConfigError, f"config.json: {OURS}", TypeError):
        return _spec({key: _read(value) for key, value in facts.items()})


def _spec(facts: Mapping[str, Any]) -> ModelSpec:
    """The spec of fields that are read. Raises ConfigError for one of another type, and for sizes of no model."""
    hints = get_type_hints(ModelSpec)
    for field in fields(ModelSpec):
        hint = hints[field.name]
        wanted = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if field.name not in facts or not all(isinstance(kind, type) for kind in wanted):
            continue  # choices and patterns, which the spec itself checks
        value = facts[field.name]
        known = (*wanted, int) if float in wanted else wanted
        if not isinstance(value, known) or isinstance(value, bool) != (bool in wanted):
            raise ConfigError(f'config.json: "{OURS}.{field.name}" must be {field.type}, got {value!r}')
    return ModelSpec(**checked_sizes(facts))


def own_config(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of a spec that no family of transformers can express."""
    values = {f.name: _write(getattr(spec, f.name)) for f in fields(ModelSpec) if f.init}
    return {
        "architectures": [
            f"Headway{'Encoder' if not spec.causal else 'ForCausalLM' if spec.encoder is None else 'EncoderDecoder'}"
        ],
        "model_type": OURS,
        "tie_word_embeddings": spec.tied,
        OURS: {"format": FORMAT, **values},
    }


def _write(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Pattern):
        return {"pattern": str(value)}
    if type(value) in _kinds().values():
        values = {f.name: _write(getattr(value, f.name)) for f in fields(value)}
        return {"kind": type(value).__name__, **values}
    if isinstance(value, tuple | list):
        return [_write(item) for item in value]
    raise ConfigError(f"a {type(value).__name__} cannot be written to config.json: {value!r}")


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_read(item) for item in value)
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"pattern"}:
        return parse(value["pattern"])
    name, kinds = value.get("kind"), _kinds()
    if name not in kinds:
        raise ConfigError(
            f"config.json: {OURS}: unknown kind {name!r}{did_you_mean(str(name), kinds)}; a position scheme or mixer "
            "of another package is known once that is imported"
        )
    inner = {key: _read(item) for key, item in value.items() if key != "kind"}
    return _spec(inner) if kinds[name] is ModelSpec else kinds[name](**checked_sizes(inner))
