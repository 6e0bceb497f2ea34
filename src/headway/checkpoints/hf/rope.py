"""Rotary positions in `config.json`: three schemas are read, and all are written, so that old and new readers agree.

    rope_theta + rope_scaling {"type": ...}         up to transformers 4.42
    rope_theta + rope_scaling {"rope_type": ...}    4.43 to 4.57
    rope_parameters {"rope_theta", "rope_type"}     5.0 on

The meaning is that of transformers 5.23 (`modeling_rope_utils`), but errors are raised for what it only warns about:
unknown keys, a YaRN factor that contradicts the two context lengths, two places that contradict each other.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader
from headway.errors import ConfigError, as_error, check_known, did_you_mean
from headway.models import ModelSpec
from headway.positions import (
    DynamicNTK,
    LinearScaling,
    Llama3,
    LongRope,
    Pairing,
    PositionScheme,
    Proportional,
    Rotary,
    Scaling,
    YaRN,
    rotations,
)

DEFAULT_THETA = 10000.0
TRAINED = "original_max_position_embeddings"
PARTIAL = "partial_rotary_factor"
SCALINGS = ("rope_scaling", "rope_parameters")
"""The keys of scalings, the older first."""
ROPE = ("max_position_embeddings", TRAINED, "rope_theta", *SCALINGS)
"""The keys that are read."""


KINDS: Mapping[str, type[Scaling] | None] = {
    "default": None,
    "linear": LinearScaling,
    "dynamic": DynamicNTK,
    "yarn": YaRN,
    "llama3": Llama3,
    "longrope": LongRope,
    "proportional": Proportional,
}
"""`rope_type` -> the class of scaling, whose fields are its keys."""
_NAMES = {kind: name for name, kind in KINDS.items()}


def read_rope(
    config: ConfigReader, head_dim: int, *, pairing: Pairing = "halves", share: float | None = None
) -> dict[str, Any]:
    """Returns the fields `positions` and `trained_context` of a `config.json`: the rotation, and the length of
    sequences that the model is meant for. (A scaling that refers to the context before scaling holds that itself.)

    `share` is the share of each head that is rotated unless `rope_parameters` give another; None if the family rotates
    whole heads. The base is taken from the config (in old files of GPT-NeoX from "rotary_emb_base"), else it is the
    family's, or 10,000. Raises ConfigError, naming the key and the numbers that disagree."""
    raw, longest = config.config, config.whole("max_position_embeddings")
    where, values = _values(raw)
    default_theta = raw.get("rotary_emb_base", config.defaults.get("rope_theta"))
    theta = _theta(where, values.get("rope_theta"), raw.get("rope_theta"), default_theta)
    name = _kind_name(where, values)
    kind = KINDS[name]
    known = _keys(kind)
    options = {
        k: v for k, v in values.items() if k not in ("type", "rope_type", "rope_theta") and v is not None
    }
    dims = _rotated(where, None if PARTIAL in known else options.pop(PARTIAL, None), share, head_dim)
    for key in options:
        if key not in known:
            raise ConfigError(
                f'{where}: unknown key "{key}"{did_you_mean(key, known)} for rope_type "{name}"; known are '
                + (", ".join(known) or "none")
            )
    if missing := [key for key, needed in known.items() if needed and key not in options]:
        raise ConfigError(f'{where}: rope_type "{name}" needs {", ".join(missing)}')
    trained = _whole(where, TRAINED, options.pop(TRAINED, None))
    top_level = _whole("config", TRAINED, raw.get(TRAINED))
    if top_level is not None and trained is not None and top_level != trained:
        raise ConfigError(f"{TRAINED} is {top_level} at the top of the config but {trained} in {where}")
    usual_context = config.defaults.get(TRAINED)
    anchor = next((n for n in (trained, top_level, usual_context) if n is not None), longest)
    # families with a default of this key always have it, also without scaling
    if kind is None and anchor != longest and usual_context is None:
        raise ConfigError(
            f"{TRAINED} is {anchor}, but no rope scaling is set; remove it, or set a rope_type other than default"
        )
    if name == "dynamic" and anchor != longest:
        raise ConfigError(
            f"{where}: rope_type dynamic scales from max_position_embeddings ({longest}), "
            f"but {TRAINED} is {anchor}; set both to the trained context"
        )
    for key in sorted({"short_factor", "long_factor"} & options.keys()):
        options[key] = _factors(where, key, options[key], dims or head_dim)
    if name in ("yarn", "longrope"):
        options["factor"] = _stretch(where, name, options.get("factor"), anchor, longest)
    if name not in ("default", "linear", "proportional"):
        options["trained_context"] = anchor
    with as_error(ConfigError, where, TypeError):
        scaling = None if kind is None else kind(**options)
    if name == "linear" and anchor not in (longest, round(longest / options["factor"])):
        raise ConfigError(
            f"{where}: {TRAINED} {anchor} x factor {options['factor']} is not max_position_embeddings {longest}; "
            f"remove {TRAINED}, which rope_type linear does not need"
        )
    if name == "dynamic" or (name == "yarn" and anchor == longest):
        longest = round(options["factor"] * anchor)
    return {
        "positions": Rotary(theta, pairing=pairing, scaling=scaling, dims=dims),
        "trained_context": longest,
    }


def write_rope(
    spec: ModelSpec, positions: PositionScheme | None = None, *, share: str | None = None
) -> dict[str, Any]:
    """Returns the keys of `config.json` for rotary positions: `rope_parameters` for new readers, `rope_theta` and
    `rope_scaling` for old ones (for linear and dynamic with exactly the two keys that the oldest readers accept), and,
    under the key `share` if it is not None, the share of each head that is rotated.

    `positions` are those of some layers, if not all have the same. Positions that are not rotary get the usual keys,
    which the caller notices by reading them again."""
    positions = spec.positions if positions is None else positions
    rotary = next(iter(rotations(positions)), Rotary(pairing="halves"))
    context, scaling = spec.trained_context, rotary.scaling
    values: dict[str, Any] = {}
    name = _NAMES[None if scaling is None else type(scaling)]
    for key, needed in _keys(KINDS[name]).items():
        value = getattr(scaling, "trained_context", None) if key == TRAINED else getattr(scaling, key)
        default = getattr(type(scaling), key, None)
        if value is not None and (needed or key == TRAINED or value != default):
            values[key] = list(value) if isinstance(value, tuple) else value
    if isinstance(scaling, DynamicNTK):
        context = values.pop(TRAINED)
    if isinstance(scaling, YaRN):  # readers compare the factor to the ratio of the two contexts
        product = scaling.factor * scaling.trained_context
        whole = abs(product - round(product)) < 1e-6 * product
        context = round(product) if whole else scaling.trained_context
    old = {"type" if name in ("linear", "dynamic") else "rope_type": name, **values}
    keys: dict[str, Any] = {
        "max_position_embeddings": context,
        "rope_theta": rotary.theta,
        "rope_scaling": None if scaling is None else old,
        "rope_parameters": {"rope_type": name, "rope_theta": rotary.theta, **values},
    }
    if share is not None:
        dims = rotary.rotated_dims(spec.head_dim)
        part = dims / spec.head_dim
        # readers round down, transformers too: 30 of 44 would be int(44 * (30 / 44)) = int(29.999999999999996)
        keys[share] = part if int(spec.head_dim * part) == dims else math.nextafter(part, 1)
        keys["rope_parameters"][PARTIAL] = keys[share]
    return keys


def _keys(kind: type[Scaling] | None) -> dict[str, bool]:
    """Returns the keys of a scaling, and whether each is required: the trained context, and YaRN's factor, may follow
    from `max_position_embeddings`."""
    if kind is None:
        return {}
    assert is_dataclass(kind)
    keys = {
        f.name: f.default is MISSING and kind is not YaRN for f in fields(kind) if f.name != "trained_context"
    }
    return {**keys, TRAINED: False}


def _values(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    values = {}
    for key in SCALINGS:
        value = config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(
                f"{key} must be null or an object such as "
                f'{{"rope_type": "linear", "factor": 2.0}}, got {value!r}'
            )
        if value:
            values[key] = _unnested(key, value)
    if len(values) == 2:
        old, new = ({**v, "rope_type": _kind_name(k, v)} for k, v in values.items())
        for value in (old, new):
            value.pop("type", None)
            value.pop("rope_theta", None)
        new.pop(PARTIAL, None)  # only the new schema has this key here
        if old != new:
            raise ConfigError(f"rope_scaling and rope_parameters disagree: {old} and {new}; keep one of them")
    return values.popitem() if values else ("rope_parameters", {})


def _unnested(key: str, value: Mapping[str, Any]) -> dict[str, Any]:
    inner = [v for v in value.values() if isinstance(v, Mapping)]
    if not inner:
        return dict(value)
    if len(inner) == len(value) and all(v == inner[0] for v in inner):
        return dict(inner[0])
    raise ConfigError(
        f"{key} has different rotary positions per layer type ({', '.join(value)}); "
        "this family has the same in all layers"
    )


def _theta(where: str, inner: object, top: object, usual: object) -> float:
    for value in (inner, top, usual):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{where}: rope_theta must be a number, got {value!r}")
    if inner is not None and top is not None and inner != top:
        raise ConfigError(
            f"rope_theta is {top} at the top of the config but {inner} in {where}; keep one of them"
        )
    return next((value for value in (inner, top, usual) if isinstance(value, int | float)), DEFAULT_THETA)


def _rotated(where: str, partial: object, share: float | None, head_dim: int) -> int | None:
    """Returns the number of rotated dims of a head; None for all."""
    if (share is None or where == "rope_scaling") and partial not in (None, 1):
        raise ConfigError(
            f"{where}: {PARTIAL} {partial} is unsupported in this family: transformers ignores it; remove it"
        )
    if share is None:
        return None
    share = ConfigReader({PARTIAL: partial}, {}).number(PARTIAL, share)
    if share > 1:
        raise ConfigError(f"config.json: {PARTIAL} must be at most 1, got {share:g}")
    dims = int(head_dim * share)
    return None if dims == head_dim else dims


def _kind_name(where: str, values: Mapping[str, Any]) -> str:
    old, new = values.get("type"), values.get("rope_type")
    if old is not None and new is not None and old != new:
        raise ConfigError(f'{where}: type is "{old}" but rope_type is "{new}"; keep one of them')
    name = new if new is not None else old
    if name is None:
        if set(values) - {"rope_theta", PARTIAL}:
            raise ConfigError(
                f"{where} lacks rope_type (it has {', '.join(values)}); known types are {', '.join(KINDS)}"
            )
        return "default"
    check_known(name, KINDS, f"{where}: unknown rope_type", are="known are")
    return str(name)


def _whole(where: str, key: str, value: object) -> int | None:
    if value is None:
        return None
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
    if not (1 <= number < 2**63 and float(number).is_integer()):
        raise ConfigError(f"{where}: {key} must be a positive whole number, got {value!r}")
    return int(number)


def _factors(where: str, key: str, value: object, dims: int) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or len(value) != dims // 2:
        description = f"{len(value)} numbers" if isinstance(value, list | tuple) else repr(value)
        raise ConfigError(
            f"{where}: {key} must list {dims // 2} numbers, one per rotated pair of dims, got {description}"
        )
    return tuple(value)


def _stretch(where: str, kind: str, factor: object, trained: int, longest: int) -> float:
    """Returns the factor of YaRN or longrope: the config's, else longest / trained. Raises ConfigError for a YaRN
    factor that disagrees with that ratio."""
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
