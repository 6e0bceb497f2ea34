"""Windows and rotary positions by the kind of a layer: the keys `layer_types`, `sliding_window` and `rope_parameters`
of families whose layers are of two kinds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader, Inexpressible
from headway.checkpoints.hf.rope import read_rope, write_rope
from headway.checkpoints.hf.windows import from_foreign, last_keys
from headway.errors import ConfigError, check_known
from headway.models import ModelSpec
from headway.patterns import Causal, Pattern
from headway.positions import NoPositions, PerLayer, PositionScheme, Rotary

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
UNUSED = 4096
"""A width for readers that insist on one, be there windows or not."""


def layer_types(kinds: object, layers: int, known: Sequence[str] = LAYER_TYPES) -> list[str]:
    """`layer_types` as a list of known kinds, one per layer. Raises ConfigError for anything else."""
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


def every(count: int, first: int = 0, other: str = SLIDING) -> Callable[[int], list[str]]:
    """The kinds of so many layers, of which every `count`-th sees all: `first`, `first` + `count`, .."""
    return lambda layers: [FULL if i % count == first % count else other for i in range(layers)]


def read_kinds(
    given: ConfigReader,
    layers: int,
    usual: Callable[[int], list[str]],
    known: Sequence[str] = LAYER_TYPES,
) -> list[str]:
    """The kind of each layer: as `layer_types` say, or as is `usual` for so many."""
    kinds = given.get("layer_types")
    return usual(layers) if kinds is None else layer_types(kinds, layers, known)


def read_windows(given: ConfigReader, kinds: Sequence[str]) -> tuple[Pattern, ...]:
    """The pattern of each layer. Raises ConfigError for windows without a width."""
    size = given.get("sliding_window")
    if SLIDING in kinds and size is None:
        raise ConfigError("config.json: layer_types has sliding_attention layers, but sliding_window is null")
    window = from_foreign("sliding_window", size)
    return tuple(window if kind == SLIDING else Causal() for kind in kinds)


def in_windows(patterns: Sequence[Pattern], positions: PositionScheme) -> dict[str, Any]:
    """The fields `patterns` and `positions` where layers that see all have no positions."""
    each = [NoPositions() if pattern == Causal() else positions for pattern in patterns]
    return {"patterns": patterns, "positions": PerLayer.of(each)}


Bases = Mapping[str, tuple[str, float]]
"""By the kind of a layer the key of its base in old files, and the base where there is none."""


def read_rope_by_kind(
    given: ConfigReader, kinds: Sequence[str], head_dim: int | Mapping[str, int], bases: Bases
) -> dict[str, Any]:
    """The fields `positions` and `trained_context` where each kind of layer rotates by a base of its own, heads of
    `head_dim`, or of that of the kind.

    `rope_parameters` have an object for each kind. In old files bases have keys of their own, and `rope_scaling` is
    that of layers that see all. Raises ConfigError as `read_rope` does."""
    nested = given.get("rope_parameters") or {}
    if not isinstance(nested, Mapping) or not {*nested} <= {*LAYER_TYPES}:
        raise given.wrong("rope_parameters", f"an object of {' and '.join(LAYER_TYPES)}", nested)
    schemes: dict[str, PositionScheme] = {}
    context = 0
    for kind in (SLIDING, FULL):
        inner, (key, usual) = nested.get(kind) or {}, bases[kind]
        base = given.get(key)
        if base is None and not (isinstance(inner, Mapping) and "rope_theta" in inner):
            base = usual
        config = {
            "max_position_embeddings": given.get("max_position_embeddings"),
            "rope_theta": base,
            "rope_parameters": inner,
            "rope_scaling": given.get("rope_scaling") if kind == FULL else None,
        }
        rope = read_rope(ConfigReader(config, {}), head_dim if isinstance(head_dim, int) else head_dim[kind])
        schemes[kind], context = rope["positions"], rope["trained_context"]
    return {"positions": PerLayer.of([schemes[kind] for kind in kinds]), "trained_context": context}


def write_by_kind(spec: ModelSpec, bases: Bases) -> dict[str, Any]:
    """The keys of windows and rotary positions by the kind of a layer; reading them again shows what they cannot
    express. Raises Inexpressible for windows of several widths."""
    windows = window_keys(spec, UNUSED)
    return {**windows, **write_rope_by_kind(spec, windows["layer_types"], bases)}


def write_rope_by_kind(spec: ModelSpec, kinds: Sequence[str], bases: Bases) -> dict[str, Any]:
    """The keys of rotary positions by the kind of a layer; reading them again shows what they cannot express."""
    parameters: dict[str, Any] = {}
    keys: dict[str, Any] = {}
    for kind in (SLIDING, FULL):
        key, usual = bases[kind]
        of = [i for i, one in enumerate(kinds) if one == kind]
        scheme = spec.layer_positions[of[0]] if of else Rotary(usual, pairing="halves")
        rope = write_rope(spec, scheme)
        parameters[kind] = rope.pop("rope_parameters")
        base = rope.pop("rope_theta")
        keys = {**keys, **rope, key: base if keys.get(key, base) == base else None}
    return {**keys, "rope_parameters": parameters}


def window_keys(spec: ModelSpec, unused: int | None = None) -> dict[str, Any]:
    """`layer_types`, and as `sliding_window` the width of all windows, or one that is `unused` where there are none.

    Raises Inexpressible for windows of several widths."""
    each = [last_keys(pattern) for pattern in spec.patterns]
    widths = {width for width in each if width is not None}
    if len(widths) > 1:
        raise Inexpressible("windows")
    kinds = [FULL if width is None else SLIDING for width in each]
    return {"sliding_window": widths.pop() if widths else unused, "layer_types": kinds}
