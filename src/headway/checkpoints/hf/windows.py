"""Windows in config.json, whose width w has several meanings, converted to ours, which counts *other* positions
(`Window(before, after)`); and the kinds of layers that differ in their windows or rotary positions: `layer_types`,
`sliding_window` and `rope_parameters`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headway.checkpoints.hf.config_keys import ConfigReader, Inexpressible
from headway.checkpoints.hf.rope import read_rope, write_rope
from headway.errors import ConfigError, check_known
from headway.models import ModelSpec
from headway.patterns import Causal, Pattern, Window
from headway.patterns.program import interval
from headway.positions import PerLayer, PositionScheme, Rotary


class Convention(NamedTuple):
    """The meaning of a width w: `sides(w)` are the other positions before and after; `even`: w must be even."""

    meaning: str
    sides: Callable[[int], tuple[int, int]]
    even: bool = False


CONVENTIONS: Mapping[str, Convention] = {
    "sliding_window": Convention("w keys, itself included, causal", lambda w: (w - 1, 0)),
    "attention_window": Convention(
        "w others, half of them on each side (Longformer)", lambda w: (w // 2, w // 2), even=True
    ),
}


def from_foreign(key: str, value: object) -> Pattern:
    """Returns the pattern that a value of a key of `CONVENTIONS` means; None means no window: `Causal()`.

    Raises ConfigError for 0 (whose meaning differs between programs), for negative or fractional values and, if the key
    requires even values, for odd ones."""
    rule = CONVENTIONS[key]
    if value is None:
        return Causal()
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{key} must be a whole number of at least 1 ({rule.meaning}) or null for no window, got {value!r}"
        )
    if rule.even and value % 2:
        raise ConfigError(f"{key} must be even ({rule.meaning}), got {value}")
    return Window(*rule.sides(value))


def last_keys(pattern: Pattern) -> int | None:
    """Returns the w of a window "the last w keys"; None for other patterns, as reading the config again shows."""
    bounds = interval(pattern)
    return None if bounds is None or bounds[0] is None else bounds[0] + 1


FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
UNUSED = 4096
"""A window width to write if no layer has a window, for readers that require one."""
PERIOD = "sliding_window_pattern"
"""The key of n if every n-th layer has full attention, in files without `layer_types`."""


def layer_types(kinds: object, layers: int, known: Sequence[str] = LAYER_TYPES) -> list[str]:
    """Returns `layer_types` as a list of known kinds, one per layer. Raises ConfigError for anything else."""
    if not isinstance(kinds, list):
        raise ConfigError(
            f'config.json: "layer_types" must be a list with one of {", ".join(known)} per layer, got {kinds!r}'
        )
    if len(kinds) != layers:
        raise ConfigError(
            f"config.json: layer_types lists {len(kinds)} layers, but num_hidden_layers is {layers}"
        )
    for number, kind in enumerate(kinds):
        check_known(kind, known, f"config.json: layer_types[{number}] is", are="known are")
    return kinds


Kinds = Callable[[ConfigReader, int], list[str]]
"""A function (config, layers) that returns the kinds of the layers if `layer_types` does not list them."""


def every(count: int, first: int = 0, other: str = SLIDING, *, key: str = "") -> Kinds:
    """Returns kinds of layers of which every `count`-th has full attention: `first`, `first` + `count`, ... `key` is a
    config key for the count, with `count` as its default."""

    def kinds(config: ConfigReader, layers: int) -> list[str]:
        n = config.whole(key, count) if key else count
        return [FULL if i % n == first % n else other for i in range(layers)]

    return kinds


def read_kinds(
    config: ConfigReader, layers: int, usual: Kinds | list[str], known: Sequence[str] = LAYER_TYPES
) -> list[str]:
    """Returns the kind of each layer: from `layer_types`, or else `usual`, a list or a function that returns one."""
    kinds = config.get("layer_types")
    if kinds is not None:
        return layer_types(kinds, layers, known)
    return usual(config, layers) if callable(usual) else usual


Bases = Mapping[str, tuple[str, float]]
"""Kind of a layer -> the key of its rotary base in old files, and the default base."""


def read_rope_by_kind(
    config: ConfigReader, kinds: Sequence[str], head_dim: int | Mapping[str, int], bases: Bases
) -> dict[str, Any]:
    """Returns the fields `positions` and `trained_context` if each kind of layer has a rotary base of its own;
    `head_dim` is the size of all heads, or that of each kind.

    `rope_parameters` have an object for each kind. In old files, bases have keys of their own, and `rope_scaling` is
    that of layers with full attention. Raises ConfigError as `read_rope` does."""
    nested = config.get("rope_parameters") or {}
    if not isinstance(nested, Mapping) or not {*nested} <= {*LAYER_TYPES}:
        raise config.wrong("rope_parameters", f"an object of {' and '.join(LAYER_TYPES)}", nested)
    schemes: dict[str, PositionScheme] = {}
    context = 0
    for kind in (SLIDING, FULL):
        inner, (key, usual) = nested.get(kind) or {}, bases[kind]
        base = config.get(key)
        if base is None and not (isinstance(inner, Mapping) and "rope_theta" in inner):
            base = usual
        keys = {
            "max_position_embeddings": config.get("max_position_embeddings"),
            "rope_theta": base,
            "rope_parameters": inner,
            "rope_scaling": config.get("rope_scaling") if kind == FULL else None,
        }
        rope = read_rope(ConfigReader(keys, {}), head_dim if isinstance(head_dim, int) else head_dim[kind])
        schemes[kind], context = rope["positions"], rope["trained_context"]
    return {"positions": PerLayer.of([schemes[kind] for kind in kinds]), "trained_context": context}


def write_rope_by_kind(spec: ModelSpec, kinds: Sequence[str], bases: Bases) -> dict[str, Any]:
    """Returns the keys of rotary positions for each kind of layer; reading them again shows what is lost."""
    parameters: dict[str, Any] = {}
    keys: dict[str, Any] = {}
    for kind in (SLIDING, FULL):
        key, usual = bases[kind]
        layers = [i for i, other in enumerate(kinds) if other == kind]
        scheme = spec.layer_positions[layers[0]] if layers else Rotary(usual, pairing="halves")
        rope = write_rope(spec, scheme)
        parameters[kind] = rope.pop("rope_parameters")
        base = rope.pop("rope_theta")
        keys = {**keys, **rope, key: base if keys.get(key, base) == base else None}
    return {**keys, "rope_parameters": parameters}


def window_keys(spec: ModelSpec, unused: int | None = None) -> dict[str, Any]:
    """Returns `layer_types`, and as `sliding_window` the width of all windows, or `unused` if there are none.

    Raises Inexpressible for windows of several widths."""
    layer_widths = [last_keys(pattern) for pattern in spec.patterns]
    widths = {width for width in layer_widths if width is not None}
    if len(widths) > 1:
        raise Inexpressible("windows")
    kinds = [FULL if width is None else SLIDING for width in layer_widths]
    return {"sliding_window": widths.pop() if widths else unused, "layer_types": kinds}
