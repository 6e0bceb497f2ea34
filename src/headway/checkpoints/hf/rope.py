"""Rotary positions in `config.json`: three schemas in, one meaning; written so that old and new readers
agree.

    rope_theta + rope_scaling {"type": ...}         up to transformers 4.42
    rope_theta + rope_scaling {"rope_type": ...}    4.43 to 4.57
    rope_parameters {"rope_theta", "rope_type"}     5.0 on

The meaning is that of transformers 5.23 (`modeling_rope_utils`), except that it warns where this raises:
unknown keys, a YaRN factor that contradicts the two context lengths, two places that contradict each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from headway.errors import ConfigError, did_you_mean
from headway.positions import DynamicNTK, LinearScaling, Llama3, LongRope, Rotary, Scaling, YaRN

DEFAULT_THETA = 10000.0
TRAINED = "original_max_position_embeddings"


@dataclass(frozen=True)
class RopeKind:
    """One `rope_type`: its keys, and the scaling that it means."""

    scaling: type[Scaling] | None
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        return self.required + self.optional


KINDS: Mapping[str, RopeKind] = MappingProxyType(
    {
        "default": RopeKind(None),
        "linear": RopeKind(LinearScaling, ("factor",), (TRAINED,)),
        "dynamic": RopeKind(DynamicNTK, ("factor",), (TRAINED,)),
        "yarn": RopeKind(
            YaRN,
            (),
            (
                "factor",
                TRAINED,
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
            ),
        ),
        "llama3": RopeKind(Llama3, ("factor", "low_freq_factor", "high_freq_factor"), (TRAINED,)),
        "longrope": RopeKind(
            LongRope, ("short_factor", "long_factor"), ("factor", TRAINED, "attention_factor")
        ),
    }
)
_NAMES = {kind.scaling: name for name, kind in KINDS.items()}


@dataclass(frozen=True)
class Rope:
    """The positions of a config: the rotation, and the tokens per row that it is meant to serve.

    The context before scaling, where a scaling is anchored at it, is the scaling's own `trained_context`.
    """

    rotary: Rotary
    context: int


def read_rope(config: Mapping[str, Any], *, max_positions: int, head_dim: int) -> Rope:
    """The rotary positions of a `config.json`. Raises ConfigError naming the key and the numbers that
    disagree."""
    where, values = _values(config)
    theta = _theta(config, where, values)
    kind_name = _kind_name(where, values)
    kind = KINDS[kind_name]
    given = {
        k: v for k, v in values.items() if k not in ("type", "rope_type", "rope_theta") and v is not None
    }
    partial = given.pop("partial_rotary_factor", None)
    if partial not in (None, 1, 1.0):
        raise ConfigError(
            f"{where}: partial_rotary_factor {partial} is not a property of this family: "
            "transformers would not honour it"
        )
    for key in given:
        if key not in kind.keys:
            hint = did_you_mean(key, kind.keys)
            raise ConfigError(
                f'{where}: unknown key "{key}"{hint} for rope_type "{kind_name}"; known are '
                + (", ".join(kind.keys) or "none")
            )
    if missing := [key for key in kind.required if key not in given]:
        raise ConfigError(f'{where}: rope_type "{kind_name}" needs {", ".join(missing)}')
    trained = _whole(where, TRAINED, given.pop(TRAINED, None))
    top = _whole("config", TRAINED, config.get(TRAINED))
    if top is not None and trained is not None and top != trained:
        raise ConfigError(f"{TRAINED} is {top} at the top of the config but {trained} in {where}")
    trained = trained if trained is not None else top
    if kind.scaling is None and trained not in (None, max_positions):
        raise ConfigError(f"{TRAINED} is {trained}, but there is no rope scaling that it could belong to")
    if kind.scaling is None:
        return Rope(Rotary(theta, pairing="halves"), max_positions)
    if kind_name == "dynamic" and trained not in (None, max_positions):
        raise ConfigError(
            f"{where}: rope_type dynamic is anchored at max_position_embeddings ({max_positions}), "
            f"but {TRAINED} is {trained}; set both to the trained context"
        )
    anchor = max_positions if trained is None else trained
    for key in ("short_factor", "long_factor"):
        _check_factors(where, key, given, head_dim)
    if kind_name in ("yarn", "longrope"):
        given["factor"] = _stretch(where, kind_name, given.get("factor"), anchor, max_positions)
    if kind_name != "linear":
        given["trained_context"] = anchor
    try:
        scaling = kind.scaling(**given)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error
    if kind_name == "linear" and anchor not in (max_positions, round(max_positions / given["factor"])):
        raise ConfigError(
            f"{where}: {TRAINED} {anchor} x factor {given['factor']} is not max_position_embeddings {max_positions}; "
            "rope_type linear does not need it: remove it"
        )
    longest = max_positions
    if kind_name == "dynamic" or (kind_name == "yarn" and anchor == max_positions):
        longest = round(given["factor"] * anchor)
    return Rope(Rotary(theta, pairing="halves", scaling=scaling), longest)


def write_rope(rotary: Rotary, context: int) -> dict[str, Any]:
    """The keys of `config.json` for a rotation: `rope_parameters` for new readers, `rope_theta` and
    `rope_scaling` (for linear and dynamic with exactly the two keys that the oldest readers accept) for old
    ones."""
    keys: dict[str, Any] = {"max_position_embeddings": context, "rope_theta": rotary.theta}
    scaling = rotary.scaling
    name = _NAMES[None if scaling is None else type(scaling)]
    if scaling is None:
        return {
            **keys,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": rotary.theta},
        }
    kind, values = KINDS[name], {}
    for key in kind.keys:
        value = getattr(scaling, "trained_context", None) if key == TRAINED else getattr(scaling, key)
        default = getattr(type(scaling), key, None)
        if value is not None and (key in kind.required or key in (TRAINED, "factor") or value != default):
            values[key] = list(value) if isinstance(value, tuple) else value
    if name in ("linear", "dynamic"):
        values.pop(TRAINED, None)
        old = {"type": name, **values}
    else:
        old = {"rope_type": name, **values}
    if isinstance(scaling, DynamicNTK):
        keys["max_position_embeddings"] = scaling.trained_context
    if isinstance(scaling, YaRN):  # readers compare the factor with the ratio of the two contexts
        product = scaling.factor * scaling.trained_context
        whole = abs(product - round(product)) < 1e-6 * product
        keys["max_position_embeddings"] = round(product) if whole else scaling.trained_context
    new = {"rope_type": name, "rope_theta": rotary.theta, **values}
    return {**keys, "rope_scaling": old, "rope_parameters": new}


def _values(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    found = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(
                f"{key} must be null or an object such as "
                f'{{"rope_type": "linear", "factor": 2.0}}, got {value!r}'
            )
        if value:
            found[key] = _unnested(key, value)
    if len(found) == 2:
        old, new = ({**v, "rope_type": _kind_name(k, v)} for k, v in found.items())
        for value in (old, new):
            value.pop("type", None)
            value.pop("rope_theta", None)
        if old != new:
            raise ConfigError(f"rope_scaling and rope_parameters disagree: {old} and {new}; keep one of them")
    for key in ("rope_parameters", "rope_scaling"):
        if key in found:
            return key, found[key]
    return "rope_parameters", {}


def _unnested(key: str, value: Mapping[str, Any]) -> dict[str, Any]:
    inner = [v for v in value.values() if isinstance(v, Mapping)]
    if not inner:
        return dict(value)
    if len(inner) == len(value) and all(v == inner[0] for v in inner):
        return dict(inner[0])
    raise ConfigError(
        f"{key} gives kinds of layers different rotary positions ({', '.join(value)}); "
        "this family has one for all its layers"
    )


def _theta(config: Mapping[str, Any], where: str, values: Mapping[str, Any]) -> float:
    inner, top = values.get("rope_theta"), config.get("rope_theta")
    for value in (inner, top):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{where}: rope_theta must be a number, got {value!r}")
    if inner is not None and top is not None and inner != top:
        raise ConfigError(
            f"rope_theta is {top} at the top of the config but {inner} in {where}; keep one of them"
        )
    theta = inner if inner is not None else top
    return DEFAULT_THETA if theta is None else theta


def _kind_name(where: str, values: Mapping[str, Any]) -> str:
    old, new = values.get("type"), values.get("rope_type")
    if old is not None and new is not None and old != new:
        raise ConfigError(f'{where}: type is "{old}" but rope_type is "{new}"; keep one of them')
    name = new if new is not None else old
    if name is None:
        if set(values) - {"rope_theta", "partial_rotary_factor"}:
            raise ConfigError(
                f"{where} has no rope_type, but {', '.join(values)}; known types are {', '.join(KINDS)}"
            )
        return "default"
    if not isinstance(name, str) or name not in KINDS:
        hint = did_you_mean(str(name), KINDS)
        raise ConfigError(f"{where}: unknown rope_type {name!r}{hint}; known are {', '.join(KINDS)}")
    return name


def _whole(where: str, key: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
        raise ConfigError(f"{where}: {key} must be a positive whole number, got {value!r}")
    return int(value)


def _check_factors(where: str, key: str, given: dict[str, Any], head_dim: int) -> None:
    if key not in given:
        return
    value = given[key]
    if not isinstance(value, list | tuple) or len(value) != head_dim // 2:
        what = f"{len(value)} numbers" if isinstance(value, list | tuple) else repr(value)
        raise ConfigError(f"{where}: {key} must list head_dim / 2 = {head_dim // 2} numbers, got {what}")
    given[key] = tuple(value)


def _stretch(where: str, kind: str, factor: object, trained: int, longest: int) -> float:
    """The factor of YaRN or longrope: as given, else longest / trained; a YaRN factor that disagrees is an
    error."""
    implied = longest / trained
    if factor is None:
        if kind == "yarn" and implied <= 1:
            raise ConfigError(
                f"{where}: rope_type yarn needs factor (or {TRAINED} below max_position_embeddings)"
            )
        return max(implied, 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        raise ConfigError(f"{where}: factor must be a number, got {factor!r}")
    if kind == "yarn" and implied != 1 and abs(implied - factor) > 1e-6 * factor:
        raise ConfigError(
            f"{where}: the YaRN factor is {factor:g}, but max_position_embeddings / {TRAINED} = "
            f"{longest} / {trained} = {implied:g}; correct the one that is wrong"
        )
    return float(factor)
