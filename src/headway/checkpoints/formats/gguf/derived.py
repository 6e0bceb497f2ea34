"""Fields of a spec that several keys of GGUF say together, or that layers of two kinds have (`architectures.py`)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader
from headway.checkpoints.hf.layouts.granite import NUMBERS
from headway.models import ModelSpec
from headway.patterns import Causal
from headway.positions import NoPositions, PositionScheme, Rotary, YaRN

SCALE, LOGIT_SCALE, LOCAL_BASE = "attention.scale", "logit_scale", "rope.freq_base_swa"
Fields = Callable[[ConfigReader, Mapping[str, Any]], dict[str, Any]]
"""Of the keys of an architecture, and the fields that are read before."""
Schemes = Callable[[Rotary, ConfigReader], tuple[PositionScheme, PositionScheme]]
"""Of the rotation and the keys, the positions of most layers, and those of every n-th."""


def nth_without(rotary: Rotary, keys: ConfigReader) -> tuple[PositionScheme, PositionScheme]:
    """Every n-th layer has no positions."""
    return rotary, NoPositions()


def unless_full(rotary: Rotary, keys: ConfigReader) -> tuple[PositionScheme, PositionScheme]:
    """Every n-th layer has no positions where the others have a window."""
    return rotary, NoPositions() if keys.get("attention.sliding_window") else rotary


def unless_tuned(rotary: Rotary, keys: ConfigReader) -> tuple[PositionScheme, PositionScheme]:
    """No positions where a key says so."""
    scheme = NoPositions() if keys.get("rope.scaling.finetuned") is False else rotary
    return scheme, scheme


def untruncated(rotary: Rotary, keys: ConfigReader) -> tuple[PositionScheme, PositionScheme]:
    """YaRN's bounds are not rounded (gpt-oss), which no key says."""
    if isinstance(rotary.scaling, YaRN):
        rotary = replace(rotary, scaling=replace(rotary.scaling, truncate=False))
    return rotary, rotary


def local_base(usual: float | None) -> Schemes:
    """Layers with windows have a base of their own, by default this or that of the others, and no scaling."""
    return lambda rotary, keys: (
        replace(rotary, theta=keys.number(LOCAL_BASE, usual or rotary.theta), scaling=None),
        rotary,
    )


def write_local_base(spec: ModelSpec) -> dict[str, Any]:
    """The base of layers with windows, if there are any."""
    layers = zip(spec.layer_positions, spec.patterns, strict=True)
    bases = (one.theta for one, pattern in layers if pattern != Causal() and isinstance(one, Rotary))
    return {LOCAL_BASE: next(bases, None)}


def scale_of_27b(layers: int) -> Fields:
    """The factor on scores is of the size of a head, but in models of so many layers."""
    return lambda keys, fields: {
        "attention_scale": (fields["width"] // fields["heads"]) ** -0.5
        if fields["layers"] == layers
        else None
    }


def read_granite(keys: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The factor on scores, and the divisor of logits."""
    scale, usual = keys.number(SCALE, 0.0), fields["head_dim"] ** -0.5
    near = abs(scale - usual) <= 1e-6 * usual  # it was rounded to 32 bits
    return {
        "attention_scale": scale if scale and not near else None,
        "logit_scale": 1 / (keys.number(LOGIT_SCALE, 0.0) or 1.0),
    }


def write_granite(spec: ModelSpec) -> dict[str, Any]:
    """The same keys."""
    numbers = NUMBERS.write(spec)
    return {SCALE: numbers["attention_multiplier"], LOGIT_SCALE: numbers["logits_scaling"]}
