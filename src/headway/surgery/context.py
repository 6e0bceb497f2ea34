"""Longer contexts with the same weights: rescales rotary frequencies, or bounds what layers see."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from torch import Tensor

from headway.errors import ConfigError, check_known
from headway.models import ModelSpec
from headway.patterns import Causal, Pattern, Sink, Window
from headway.positions import (
    DynamicNTK,
    Learned,
    LinearScaling,
    Llama3,
    PerLayer,
    PositionScheme,
    Rotary,
    Scaling,
    YaRN,
)

Method = Literal["linear", "ntk", "yarn", "llama3", "dynamic"]
METHODS: Mapping[Method, str] = MappingProxyType(
    {
        "linear": "every frequency / factor: no angle is new, but neighbouring positions differ less",
        "ntk": "a larger base: the fastest pair stays, the slowest rotates / factor",
        "yarn": "fast pairs stay, slow ones rotate / factor, and scores are sharpened",
        "llama3": "by wavelength: short waves stay, long ones rotate / factor",
        "dynamic": "the base grows with each row's own length: rows within the trained context stay as they are",
    }
)
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR = 1.0, 4.0  # as in LLaMA 3.1
_SCALINGS: Mapping[str, Callable[[float, int], Scaling]] = {
    "linear": lambda factor, trained: LinearScaling(factor),
    "yarn": YaRN,
    "llama3": lambda factor, trained: Llama3(factor, LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, trained),
    "dynamic": DynamicNTK,
}


def stretch_context(
    spec: ModelSpec, state: Mapping[str, Tensor], method: Method, factor: float
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Returns the same weights with frequencies for rows of factor * c tokens, c = `spec.trained_context`.

        linear    f_i / factor                                  Chen et al. 2023, "position interpolation"
        ntk       theta' = theta factor^(d / (d - 2))           bloc97 2023, "NTK-aware scaled RoPE"
        yarn      `YaRN(factor, c)`                             Peng et al. 2023, section 3
        llama3    `Llama3(factor, 1, 4, c)`                     LLaMA 3.1
        dynamic   `DynamicNTK(factor, c)`                       emozilla 2023, "dynamic NTK"

    d is the number of rotated dims of a layer; every layer with rotary positions is rescaled.
    `trained_context` becomes factor * c, the length that the model should serve from now on (the scaling keeps c), and
    a smaller `max_context` is raised to it.

    Raises:
        ConfigError: positions that are not rotary, are scaled already, or have frequencies that are trained or not
            powers of a theta; factor below 1; an unknown method; ntk or dynamic with 2 rotated dims, for which
            d / (d - 2) is undefined.
    """
    check_known(method, METHODS, "stretch_context: there is no method")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor < math.inf:
        raise ConfigError(
            "stretch_context: factor is the longest row over the trained context, a number of at least 1, "
            f"got {factor!r}"
        )
    trained = spec.trained_context
    if spec.positions.marks != "queries and keys":
        _checked(spec.positions)
    layers = zip(spec.positions.expand(spec.layers), spec.key_sizes, strict=True)
    positions = PerLayer.of(
        [
            scheme if scheme.marks == "nothing" else _stretched(scheme, method, float(factor), trained, dim)
            for scheme, (_, dim) in layers
        ]
    )
    longest = round(factor * trained)
    limit = None if spec.max_context is None else max(spec.max_context, longest)
    new = replace(spec, positions=positions, trained_context=longest, max_context=limit)
    return new, dict(state)


def _stretched(
    positions: PositionScheme, method: Method, factor: float, trained: int, head_dim: int
) -> PositionScheme:
    """Returns the positions of a layer rescaled by `method`."""
    rotary = _checked(positions)
    dims = rotary.rotated_dims(head_dim)
    if method in ("ntk", "dynamic") and dims <= 2:
        raise ConfigError(
            f"stretch_context: {method}'s exponent d / (d - 2) needs more than 2 rotated dims, got {dims}; use linear"
        )
    if method == "ntk":
        return replace(rotary, theta=rotary.theta * factor ** (dims / (dims - 2)))
    return replace(rotary, scaling=_SCALINGS[method](factor, trained))


def _checked(positions: PositionScheme) -> Rotary:
    """Returns `positions` if they are rotary with unscaled frequencies theta^(-2i/d), which every method assumes;
    raises ConfigError otherwise."""
    if not isinstance(positions, Rotary):
        why = (
            f"they are a trained table of {positions.size} rows, and row {positions.size} is undefined"
            if isinstance(positions, Learned)
            else "there are no frequencies to rescale"
        )
        raise ConfigError(f"stretch_context: this model's positions are {positions}, not rotary: {why}")
    if positions.scaling is not None:
        raise ConfigError(
            f"stretch_context: this model's frequencies are already rescaled by {positions.scaling}; "
            "start from the original model"
        )
    if positions.trainable or positions.schedule != "powers":
        frequencies = "trained" if positions.trainable else f"of schedule {positions.schedule!r}"
        raise ConfigError(
            f"stretch_context: this model's frequencies are {frequencies}, but {', '.join(METHODS)} rescale only "
            "powers of a theta"
        )
    return positions


def put_window(
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    keys: int,
    *,
    sinks: int = 0,
    layers: Sequence[int] | None = None,
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Returns the same weights with the pattern `Window.last(keys) | (Causal() & Sink(sinks))` in `layers`.

    The caches of these layers then hold `keys` + `sinks` slots per row, whatever its length. In a layer that was fully
    causal, rows of up to `keys` + `sinks` tokens see the same keys as before. Keys keep their original positions, so
    the distance between a sink and its queries grows (Xiao et al. 2023, "Efficient streaming language models with
    attention sinks", section 3.2, renumber the kept keys by their place in the cache).

    Args:
        keys: number of keys that a query sees, itself included, 1 or more.
        sinks: number of first tokens of the document that every later token sees.
        layers: layer numbers from 0; by default those whose caches are unbounded (`open_layers`). A named layer gets
            the new pattern whatever its old one was.

    Raises PatternError for keys below 1 or negative sinks; ConfigError for layers out of range, or no layers.
    """
    last = Window.last(keys)
    pattern: Pattern = last | (Causal() & Sink(sinks)) if sinks else last
    chosen = open_layers(spec) if layers is None else tuple(layers)
    if not chosen:
        why = (
            "layers is empty"
            if layers is not None
            else "every layer has a bounded cache already: "
            + "; ".join(dict.fromkeys(map(str, spec.patterns)))
        )
        raise ConfigError(f"put_window: {why}; give the layers to change")
    if outside := [i for i in chosen if isinstance(i, bool) or not 0 <= i < spec.layers]:
        raise ConfigError(
            f"put_window: layers are 0 to {spec.layers - 1}, got {', '.join(map(str, outside))}"
        )
    patterns = [pattern if i in chosen else old for i, old in enumerate(spec.patterns)]
    return spec.with_patterns(patterns), dict(state)


def open_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Returns the layers without a bound on the keys that later queries may still see: those whose caches grow."""
    return tuple(i for i, pattern in enumerate(spec.patterns) if pattern.retention.reach is None)


def parse_layers(text: str, count: int) -> tuple[int, ...]:
    """Returns layer numbers from text: "all", or numbers and ranges such as "0-3,5" (both ends included).

    Raises ConfigError for anything else, and for layers outside 0 .. count - 1."""
    if text.strip() == "all":
        return tuple(range(count))
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = (side.strip() for side in part.partition("-"))
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < count):
            raise ConfigError(
                f"layers {text!r}: {part.strip()!r} is neither a layer nor a range of layers; they are numbered "
                f"0 to {count - 1}: '0-{count - 1}', '0,{count - 1}' or 'all'"
            )
        layers.extend(range(int(first), int(last) + 1))
    return tuple(dict.fromkeys(layers))
