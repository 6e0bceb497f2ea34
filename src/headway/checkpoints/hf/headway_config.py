"""The key "headway" of `config.json`: facts that transformers has no word for.

In a folder of a known family it holds a few facts beside the family's own keys (`FACTS`). In a folder of
model_type "headway", which transformers refuses rather than misreads, it holds the whole spec, field by
field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from headway.attention.linear_attention import LinearAttentionSpec
from headway.checkpoints.hf.config_keys import OURS
from headway.checkpoints.hf.size_limits import checked_sizes
from headway.errors import ConfigError, did_you_mean
from headway.models import Head, ModelSpec
from headway.patterns import Pattern, parse
from headway.positions import (
    DynamicNTK,
    Learned,
    LinearBias,
    LinearScaling,
    Llama3,
    LongRope,
    NoPositions,
    PerLayer,
    PositionScheme,
    Relative,
    Rotary,
    Scaling,
    Sinusoidal,
    SpecialOrthogonal,
    T5Bias,
    YaRN,
)

FORMAT = 1
FACTS: Mapping[str, tuple[type, ...]] = {
    "family": (str,),
    "trained_context": (int,),
    "max_context": (int, type(None)),
}
_PLAIN: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
}
_VALUES: Mapping[str, tuple[type, ...]] = {
    "encoder": (ModelSpec,),
    "head": (Head,),
    "linear": (LinearAttentionSpec,),
    "positions": (PositionScheme,),
}
SCHEMES = (
    NoPositions,
    Sinusoidal,
    Learned,
    Rotary,
    SpecialOrthogonal,
    Relative,
    T5Bias,
    LinearBias,
    PerLayer,
)
SCALINGS = (LinearScaling, DynamicNTK, YaRN, Llama3, LongRope)
KINDS = {kind.__name__: kind for kind in (*SCHEMES, *SCALINGS[1:], Head, ModelSpec)} | {
    "Linear": LinearScaling,
    "LinearAttention": LinearAttentionSpec,
}
NAMES = {kind: name for name, kind in KINDS.items()}


def own_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The facts beside a known family's keys. Raises ConfigError for one that is not known or of another
    type."""
    facts = config.get(OURS)
    if facts is None:
        return {}
    if not isinstance(facts, Mapping):
        raise ConfigError(f'config.json: "{OURS}" must be an object, got {facts!r}')
    for key, value in facts.items():
        if key not in FACTS:
            raise ConfigError(
                f'config.json: unknown key "{OURS}.{key}"{did_you_mean(key, FACTS)}; known are {", ".join(FACTS)}'
            )
        if type(value) not in FACTS[key]:
            raise ConfigError(f'config.json: "{OURS}.{key}" must be {FACTS[key][0].__name__}, got {value!r}')
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
            f"config.json: {OURS}.format is {version!r}; this version of headway reads {FORMAT}"
        )
    known = [f.name for f in fields(ModelSpec) if f.init]
    for key in facts:
        if key not in known:
            raise ConfigError(f'config.json: unknown key "{OURS}.{key}"{did_you_mean(key, known)}')
    try:
        return _spec({key: _read(value) for key, value in facts.items()})
    except TypeError as error:
        raise ConfigError(f"config.json: {OURS}: {error}") from error


def _spec(facts: Mapping[str, Any]) -> ModelSpec:
    """The spec of fields that are read. Raises ConfigError for one of another type, and for sizes of no model."""
    for field in fields(ModelSpec):
        wanted = _VALUES.get(field.name) or _PLAIN.get(str(field.type).removesuffix(" | None"))
        if wanted is None or field.name not in facts:
            continue
        value = facts[field.name]
        optional = value is None and str(field.type).endswith(" | None")
        if not optional and (not isinstance(value, wanted) or isinstance(value, bool) != (bool in wanted)):
            raise ConfigError(f'config.json: "{OURS}.{field.name}" must be {field.type}, got {value!r}')
    return ModelSpec(**checked_sizes(facts))


def own_config(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of a spec that no family of transformers can say."""
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
    if isinstance(value, PositionScheme | Scaling | Head | LinearAttentionSpec | ModelSpec):
        kind: Any = type(value)
        return {"kind": NAMES[kind], **{f.name: _write(getattr(value, f.name)) for f in fields(kind)}}
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
    kind = value.get("kind")
    if kind not in KINDS:
        raise ConfigError(f"config.json: {OURS}: unknown kind {kind!r}{did_you_mean(str(kind), KINDS)}")
    inner = {key: _read(item) for key, item in value.items() if key != "kind"}
    return _spec(inner) if KINDS[kind] is ModelSpec else KINDS[kind](**inner)
