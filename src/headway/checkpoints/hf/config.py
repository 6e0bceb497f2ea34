"""From `config.json` to `ModelSpec` and back: by the layout of a family of transformers where one can express the spec,
else as model_type "headway"."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from headway.checkpoints.hf.config_keys import OURS
from headway.checkpoints.hf.headway_config import FACTS, own_config, own_facts, spec_from_own
from headway.checkpoints.hf.layouts import (
    LAYOUTS,
    OWN_NAMES,
    Inexpressible,
    Layout,
    TensorNames,
    layout_of,
    layouts_for,
)
from headway.checkpoints.hf.layouts.base import differing
from headway.checkpoints.hf.layouts.pairs import marian_spec
from headway.checkpoints.hf.wrapped import text_config
from headway.errors import ConfigError, check_known
from headway.models import Head, ModelSpec
from headway.models.missing import unknown_model
from headway.patterns import Causal, Pattern, Window
from headway.patterns.program import interval, reads_globals
from headway.positions import PerLayer, PositionScheme, Rotary, in_pairing, rotations


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec that a `config.json` describes; of a model that reads images, too, that of its text model.

    Raises ConfigError, naming key and value, for an unknown family, an unknown key (with the nearest known one), a key
    with a value that would be ignored, and values that contradict each other.
    """
    if config.get("model_type") == OURS:
        return spec_from_own(config)
    config = text_config(config)
    layout, facts = _layout(config), own_facts(config)
    family = facts.get("family", layout.family)
    if all(layout is not one for one in layouts_for(family)):
        raise ConfigError(
            f'config.json: "{OURS}.family" is {family!r}, whose folders are not of model_type {layout.family!r}'
        )
    return replace(layout.spec(config), **facts)


def tensor_names(config: Mapping[str, Any]) -> TensorNames:
    """How the tensors of a folder with this config are named. Raises ConfigError for an unknown family."""
    return OWN_NAMES if config.get("model_type") == OURS else _layout(text_config(config)).tensors


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of a spec; `spec_from_config` of it is the spec again (patterns in their shortest form).

    It is that of the spec's own family where that can express the spec, else of the first of `layouts_for` that can. A
    spec that transformers would only misread (adjacent pairing, sinks, windows of several sizes) gets the model_type
    "headway", which transformers refuses. So does an embedder without a dense layer, unless what it pools is said in
    files of sentence-transformers beside the bare encoder (`bare`).
    """
    spec = _shortest(spec)
    for layout in layouts_for(spec.family):
        config, facts, lost = _written(layout, spec)
        if not lost:
            return {**config, OURS: facts} if facts else config
    return own_config(spec)


def bare(spec: ModelSpec) -> ModelSpec:
    """An embedder without its head, which transformers has no class for and sentence-transformers describes in files
    beside the encoder. Any other spec as it is; so is that of an embedder with a dense layer, or whose pooled token is
    global, which they do not say."""
    if spec.head.task != "embed" or spec.head.dense is not None or any(map(reads_globals, spec.patterns)):
        return spec
    return spec.with_head(Head("states"))


def unsupported_by_transformers(spec: ModelSpec) -> str | None:
    """What keeps transformers from expressing a spec; None when it can (with sentence-transformers, an embedder)."""
    marian = marian_spec(spec)
    if marian is not None:  # `save_folder` writes it as such, others as it is
        return unsupported_by_transformers(marian) or f"family ({spec.family})"
    spec = _shortest(bare(spec))
    tried = [_written(layout, spec) for layout in layouts_for(spec.family)]
    _, _, lost = min(tried, key=lambda one: (not one[0], len(one[2])))
    if lost and layout_of(spec.family) is None:
        return f"family ({spec.family})"
    return ", ".join(lost) or None


def transformers_verdict(spec: ModelSpec) -> str:
    """Whether transformers loads the folder of a spec and, if not, why, for a report."""
    reason = unsupported_by_transformers(spec)
    return "loads it" if reason is None else f"refuses it: it cannot express its {reason}"


def _layout(config: Mapping[str, Any]) -> Layout:
    """The layout of a folder of transformers: by `model_type` or, in old files without one, by the class."""
    name, classes = config.get("model_type"), config.get("architectures")
    if name is None:
        name = next((n for n, one in LAYOUTS.items() for c in one.architectures if classes == [c]), None)
    check_known(name, LAYOUTS, "config.json: headway knows no model_type", hint=unknown_model)
    return LAYOUTS[str(name)]


def _written(layout: Layout, spec: ModelSpec) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """A layout's config of a spec, the facts to store with it, and the fields that are lost nevertheless: none where
    the config expresses the spec."""
    try:
        config = layout.config(spec)
        back = spec_from_config(config)
    except Inexpressible as error:
        return {}, {}, [str(error)]
    except ConfigError as error:  # a value that the family does not allow, such as no token types
        return {}, {}, [f"spec ({str(error).removeprefix('config.json: ')})"]
    differ = differing(spec, back)
    facts = {name: getattr(spec, name) for name in FACTS if name in differ}
    lost = [_named(name, spec, back) for name in differ if name not in FACTS]
    return config, facts, lost


def _named(field: str, spec: ModelSpec, back: ModelSpec) -> str:
    """A field that is lost; of positions the pairing, where that is all, and of a head what it pools."""
    if field == "head" and replace(spec.head, pool=back.head.pool) == back.head:
        return f'head (pool="{spec.head.pool}")'
    theirs = rotations(back.positions)
    if field == "positions" and theirs:
        with suppress(ConfigError):  # rotated values are in their pairing for good
            if in_pairing(spec.positions, theirs[0].pairing) == back.positions:
                return "rotary pairing"
    return field


def _shortest(spec: ModelSpec) -> ModelSpec:
    """The same spec with patterns and positions in the form that a config is read into."""
    positions = spec.positions
    if isinstance(positions, Rotary | PerLayer):
        each = zip(spec.layer_positions, spec.key_sizes, strict=True)
        positions = PerLayer.of([_whole(one, head_dim) for one, (_, head_dim) in each])
    return replace(spec, patterns=tuple(_short(p) for p in spec.patterns), positions=positions)


def _whole(positions: PositionScheme, head_dim: int) -> PositionScheme:
    """The same, without a number of rotated dims where it is all of a head."""
    if isinstance(positions, Rotary) and positions.dims == head_dim:
        return replace(positions, dims=None)
    return positions


def _short(pattern: Pattern) -> Pattern:
    bounds = interval(pattern)
    if bounds is None or bounds[1] != 0:
        return pattern
    return Causal() if bounds[0] is None else Window(bounds[0], 0)
