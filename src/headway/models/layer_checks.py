"""Validates the fields of a `ModelSpec` that are given per layer."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from headway.errors import ConfigError, as_error, check_whole
from headway.heads import Heads
from headway.models.mixers import Softmax, kind_of

T = TypeVar("T")


def check_layers(spec: Any) -> None:
    """Raises ConfigError unless the sizes of softmax layers fit, and layers that reuse another layer's keys and
    values name an earlier layer with equal settings."""
    sources = spec.key_layers
    for i, source in enumerate(sources):
        own_keys = getattr(spec.mixers[i], "kv_from", None) is None
        is_source = own_keys or (type(source) is int and 0 <= source < i and sources[source] == source)
        if not is_source:
            raise ConfigError(
                f"ModelSpec: layer {i} has kv_from={source!r}, which must be the number of an earlier layer with keys "
                "and values of its own"
            )
    sizes = spec.key_sizes
    for i in spec.softmax_layers:
        mixer, source = spec.mixers[i], sources[i]
        for name in ("kv_heads", "head_dim"):
            if (size := getattr(mixer, name)) is not None:
                check_whole(f"ModelSpec: {name} of layer {i}", size, 1)
        if mixer.beside is not None:
            _check_beside(spec, i)
        elif mixer.factors != (1.0, 1.0):
            raise ConfigError(
                f"ModelSpec: layer {i} has factors {mixer.factors}, but no mixer beside attention; give beside, or "
                "leave factors out"
            )
        if mixer != Softmax() and (spec.global_projections or spec.encoder is not None):
            raise ConfigError(
                f"ModelSpec: layer {i} is {mixer}, which is not supported with "
                + ("global_projections" if spec.global_projections else "an encoder")
            )
        with as_error(ConfigError, f"ModelSpec: layer {i}"):
            Heads.of(spec.heads, sizes[i][0])
        if mixer.kv_from is None:
            continue
        if mixer != Softmax(kv_from=source):
            raise ConfigError(
                f"ModelSpec: layer {i} takes the keys and values of layer {source}, with their sizes and norms; give "
                f"Softmax(kv_from={source}) without other options, got {mixer}"
            )
        alike = {
            "pattern": (spec.patterns[i], spec.patterns[source]),
            "positions": (spec.positions.at(i), spec.positions.at(source)),
            "kind": (Softmax, type(spec.mixers[source])),
        }
        for what, (ours, theirs) in alike.items():
            if ours != theirs:
                raise ConfigError(
                    f"ModelSpec: layer {i} takes the keys and values of layer {source}, so both need the same {what}; "
                    f"got {ours} and {theirs}"
                )


def _check_beside(spec: Any, layer: int) -> None:
    """Raises ConfigError unless a layer's second mixer keeps a state without positions, and its factors are two
    positive numbers."""
    mixer = spec.mixers[layer]
    kind = kind_of(mixer.beside)
    if kind.positions:
        raise ConfigError(
            f"ModelSpec: layer {layer} has {kind.name} beside attention; beside must be a mixer with a recurrent "
            "state, such as SSDSpec"
        )
    if len(mixer.factors) != 2 or not all(0 < factor < math.inf for factor in mixer.factors):
        raise ConfigError(
            f"ModelSpec: factors of layer {layer} must be two finite numbers above 0, got {mixer.factors}"
        )


def expand_hidden(hidden: Any, layers: int, usual: int) -> tuple[int | None, ...]:
    """Returns `ModelSpec.layer_hidden` for each layer, 0 for the `usual` width. Raises ConfigError for values that
    are not whole numbers, and for a list whose length does not divide the number of layers."""
    each = tuple(hidden) if isinstance(hidden, list | tuple) else (hidden,)
    for size in each:
        if size is not None:
            check_whole("ModelSpec: layer_hidden", size, 0)
    if {*each} != {0} and not usual:
        raise ConfigError(
            f"ModelSpec: hidden=0 means no feed-forward in any layer, got layer_hidden={hidden}"
        )
    each = tuple(0 if size == usual else size for size in each)
    if 0 not in each and usual:
        raise ConfigError(
            f"ModelSpec: hidden={usual} is the width of no layer, got layer_hidden={hidden}; set hidden to one of these"
        )
    return by_layer("layer_hidden", each[:1] if len(set(each)) == 1 else each, layers)


def expand_sparsity(sparsity: Any, layers: int) -> tuple[float, ...]:
    """Returns `ModelSpec.mlp_sparsity` for each layer. Raises ConfigError for a value that is not a share from 0 to
    below 1, and for a list whose length does not divide the number of layers."""
    each = tuple(sparsity) if isinstance(sparsity, list | tuple) else (sparsity,)
    if wrong := [share for share in each if not isinstance(share, int | float) or not 0 <= share < 1]:
        raise ConfigError(f"ModelSpec: mlp_sparsity must be at least 0 and below 1, got {wrong[0]!r}")
    return by_layer("mlp_sparsity", each[:1] if len({*each}) == 1 else each, layers)


def own_sizes(mixer: Softmax, spec: Any) -> Softmax:
    """Returns the mixer with sizes that equal the model's own reset to None."""
    same: dict[str, Any] = {
        n: None for n in ("kv_heads", "head_dim") if getattr(mixer, n) == getattr(spec, n)
    }
    return replace(mixer, **same)


def by_layer(what: str, values: Sequence[T], layers: int) -> tuple[T, ...]:
    """Returns one value per layer, from one for all layers or a list that is repeated a whole number of times.
    Raises ConfigError if its length does not divide `layers`."""
    if not values or layers % len(values):
        raise ConfigError(
            f"ModelSpec: {len(values)} {what} do not fit {layers} layers; give one for all, one per layer, or "
            f"a list that is repeated (its length must divide {layers})"
        )
    return tuple(values) * (layers // len(values))
