"""A bound on what layers see: the last w keys and the first s. (Xiao et al. 2023, "Efficient streaming language
models with attention sinks", section 3.2.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.patterns import Causal, Pattern, Sink, Window


def put_window(
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    keys: int,
    *,
    sinks: int = 0,
    layers: Sequence[int] | None = None,
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The same weights, seeing through `Window.last(keys) | (Causal() & Sink(sinks))` in `layers`.

    Those layers' caches then hold `keys` + `sinks` slots of a row, however long it is. Where a layer saw all
    before, rows of up to `keys` + `sinks` tokens see what they saw. Keys keep the positions that they had, so a
    sink moves away from its queries (the paper numbers the kept keys anew, by their place in the cache).

    Args:
        keys: keys that a query sees, itself included, 1 or more.
        sinks: first tokens of the document that are seen from everywhere.
        layers: numbers from 0; unless given, those that see all before them (`open_layers`). A layer that is named
            takes the new pattern whatever it had.

    Raises PatternError for keys below 1 or negative sinks; ConfigError for layers that are not there, or none.
    """
    pattern: Pattern = Window.last(keys) | (Causal() & Sink(sinks))
    pattern = pattern if sinks else Window.last(keys)
    chosen = open_layers(spec) if layers is None else tuple(layers)
    if not chosen:
        why = (
            "no layer is named"
            if layers is not None
            else "every layer has a bound already: " + "; ".join(dict.fromkeys(map(str, spec.patterns)))
        )
        raise ConfigError(f"put_window: {why}; name the layers that shall change")
    if outside := [i for i in chosen if isinstance(i, bool) or not 0 <= i < spec.layers]:
        raise ConfigError(
            f"put_window: layers are 0 to {spec.layers - 1}, got {', '.join(map(str, outside))}"
        )
    patterns = [pattern if i in chosen else old for i, old in enumerate(spec.patterns)]
    return spec.with_patterns(patterns), dict(state)


def open_layers(spec: ModelSpec) -> tuple[int, ...]:
    """The layers without a bound on the keys that later queries may still see: their caches grow."""
    return tuple(i for i, pattern in enumerate(spec.patterns) if pattern.retention.reach is None)


def parse_layers(text: str, count: int) -> tuple[int, ...]:
    """Layer numbers from text: "all", or numbers and ranges such as "0-3,5" (both ends included).

    Raises ConfigError for anything else, and for layers beyond 0 .. count - 1."""
    if text.strip() == "all":
        return tuple(range(count))
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = (side.strip() for side in part.partition("-"))
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < count):
            raise ConfigError(
                f"layers {text!r}: {part.strip()!r} is neither a layer nor a range of layers; they are numbered "
                f"0 to {count - 1}: '0-{count - 1}', '0,{count - 1}' or 'all'"
            )
        found.extend(range(int(first), int(last) + 1))
    return tuple(dict.fromkeys(found))
