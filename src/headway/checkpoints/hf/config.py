"""Converts `config.json` to `ModelSpec` and back: by the layout of a family of transformers if one can express the
spec, else as model_type "headway".

Facts that transformers has no key for are stored under the key "headway". In a folder of a known family it adds a few
facts to the family's own keys (`FACTS`). In a folder of model_type "headway", which transformers refuses rather than
misreads, it holds the whole spec, field by field.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from types import UnionType
from typing import Any, get_args, get_type_hints

from headway.checkpoints.hf.config_keys import OURS, Inexpressible, checked_sizes
from headway.checkpoints.hf.layouts import LAYOUTS, layout_of, layouts_for
from headway.checkpoints.hf.layouts.base import Layout, differing
from headway.checkpoints.hf.layouts.pairs import marian_spec
from headway.checkpoints.hf.layouts.rules import TensorNames
from headway.checkpoints.hf.layouts.tensors import OWN_NAMES
from headway.checkpoints.hf.wrapped import text_config
from headway.errors import ConfigError, as_error, check_known, did_you_mean
from headway.models import Head, ModelSpec
from headway.models.missing import unknown_model
from headway.models.mixers import MIXERS
from headway.patterns import Causal, Pattern, Window, parse
from headway.patterns.program import interval, reads_globals
from headway.positions import PerLayer, PositionScheme, Rotary, Scaling, in_pairing, rotations


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Returns the spec that a `config.json` describes; for a multimodal model, that of its text model.

    Raises ConfigError, naming key and value, for an unknown family, an unknown key (with the nearest known one), a key
    with a value that would be ignored, and values that contradict each other.
    """
    if config.get("model_type") == OURS:
        return spec_from_own(config)
    config = text_config(config)
    layout, facts = _layout(config), own_facts(config)
    family = facts.get("family", layout.family)
    if all(layout is not other for other in layouts_for(family)):
        raise ConfigError(
            f'config.json: "{OURS}.family" {family!r} does not fit model_type {layout.family!r}'
        )
    return replace(layout.spec(config), **facts)


def tensor_names(config: Mapping[str, Any]) -> TensorNames:
    """Returns the tensor names of a folder with this config. Raises ConfigError for an unknown family."""
    return OWN_NAMES if config.get("model_type") == OURS else _layout(text_config(config)).tensors


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Returns the `config.json` of a spec; `spec_from_config` of it is the spec again (with patterns in their shortest
    form).

    Its `model_type` is that of the spec's own family if that can express the spec, else of the first of `layouts_for`
    that can. A spec that transformers would misread (adjacent pairing, sinks, windows of several sizes) gets the
    model_type "headway", which transformers refuses. So does an embedder without a dense layer, unless
    sentence-transformers' files, stored with the bare encoder, say how it pools (`bare`).
    """
    spec = _shortest(spec)
    for layout in layouts_for(spec.family):
        config, facts, lost = _written(layout, spec)
        if not lost:
            return {**config, OURS: facts} if facts else config
    return own_config(spec)


def bare(spec: ModelSpec) -> ModelSpec:
    """Returns the spec of an embedder without its head, which has no class in transformers and which
    sentence-transformers describes in files of its own. Any other spec is returned unchanged; so is that of an embedder
    with a dense layer or with global tokens, which those files cannot describe."""
    if spec.head.task != "embed" or spec.head.dense is not None or any(map(reads_globals, spec.patterns)):
        return spec
    return spec.with_head(Head("states"))


def unsupported_by_transformers(spec: ModelSpec) -> str | None:
    """Returns what keeps transformers from expressing a spec; None if it can (an embedder with
    sentence-transformers)."""
    marian = marian_spec(spec)
    if marian is not None:  # `save_folder` writes the Marian model
        return unsupported_by_transformers(marian) or f"family ({spec.family})"
    spec = _shortest(bare(spec))
    tried = [_written(layout, spec) for layout in layouts_for(spec.family)]
    _, _, lost = min(tried, key=lambda attempt: (not attempt[0], len(attempt[2])))
    family_layout = layout_of(spec.family)
    if (lost and family_layout is None) or (
        not lost and family_layout is not None and not family_layout.in_transformers
    ):
        return f"family ({spec.family})"
    return ", ".join(lost) or None


def transformers_verdict(spec: ModelSpec) -> str:
    """Returns whether transformers loads the folder of a spec and, if not, why, as a phrase for a report."""
    reason = unsupported_by_transformers(spec)
    return "loads it" if reason is None else f"refuses it: it cannot express its {reason}"


def _layout(config: Mapping[str, Any]) -> Layout:
    """Returns the layout of a folder of transformers: by `model_type` or, in old files without one, by the class."""
    name, classes = config.get("model_type"), config.get("architectures")
    if name is None:
        name = next(
            (n for n, layout in LAYOUTS.items() for c in layout.architectures if classes == [c]), None
        )
    check_known(name, LAYOUTS, "config.json: headway knows no model_type", hint=unknown_model)
    return LAYOUTS[str(name)]


def _written(layout: Layout, spec: ModelSpec) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Returns a layout's config of a spec, the facts to store under "headway", and the fields that are lost
    nevertheless: an empty list if the config expresses the spec."""
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
    """Returns the name of a field that is lost, more precisely if only the rotary pairing or the head's pooling is."""
    if field == "head" and replace(spec.head, pool=back.head.pool) == back.head:
        return f'head (pool="{spec.head.pool}")'
    theirs = rotations(back.positions)
    if field == "positions" and theirs:
        with suppress(ConfigError):  # if values are rotated too, the pairing cannot change
            if in_pairing(spec.positions, theirs[0].pairing) == back.positions:
                return "rotary pairing"
    return field


def _shortest(spec: ModelSpec) -> ModelSpec:
    """Returns the spec with patterns and positions in the form that reading a config gives."""
    positions = spec.positions
    if isinstance(positions, Rotary | PerLayer):
        each = zip(spec.layer_positions, spec.key_sizes, strict=True)
        positions = PerLayer.of([_whole(scheme, head_dim) for scheme, (_, head_dim) in each])
    return replace(spec, patterns=tuple(_short(p) for p in spec.patterns), positions=positions)


def _whole(positions: PositionScheme, head_dim: int) -> PositionScheme:
    """Returns the positions, with `dims` None if all dims of a head are rotated."""
    if isinstance(positions, Rotary) and positions.dims == head_dim:
        return replace(positions, dims=None)
    return positions


def _short(pattern: Pattern) -> Pattern:
    bounds = interval(pattern)
    if bounds is None or bounds[1] != 0:
        return pattern
    return Causal() if bounds[0] is None else Window(bounds[0], 0)


FORMAT = 3
FACTS: Mapping[str, tuple[type, ...]] = {
    "family": (str,),
    "trained_context": (int,),
    "max_context": (int, type(None)),
}


def _kinds() -> dict[str, type[Any]]:
    """Returns classes by their name, which is stored under the key `kind`: position schemes, scalings and mixers
    (including those of other packages that are imported), and the other classes of a spec's fields."""
    schemes = (*_subclasses(PositionScheme), *_subclasses(Scaling))
    of_fields = (kind for hint in get_type_hints(ModelSpec).values() for kind in _classes(hint))
    return {kind.__name__: kind for kind in (*schemes, *MIXERS, *of_fields)}


def _classes(hint: Any) -> list[type[Any]]:
    """Returns the dataclasses that a type names: [Experts] for tuple[Experts | None, ...]."""
    inner = [kind for part in get_args(hint) for kind in _classes(part)]
    return [hint] if isinstance(hint, type) and is_dataclass(hint) else inner


def _subclasses(kind: type[Any]) -> list[type[Any]]:
    return [subclass for below in kind.__subclasses__() for subclass in (below, *_subclasses(below))]


def own_facts(config: Mapping[str, Any], known: Mapping[str, tuple[type, ...]] = FACTS) -> dict[str, Any]:
    """Returns the values under "headway" in a known family's config; `known` are their types. Raises ConfigError for a
    key that is unknown or of another type."""
    facts = config.get(OURS)
    if facts is None:
        return {}
    if not isinstance(facts, Mapping):
        raise ConfigError(f'config.json: "{OURS}" must be an object, got {facts!r}')
    for key, value in facts.items():
        check_known(key, known, f"config.json: {OURS} has no key")
        if type(value) not in known[key]:
            raise ConfigError(f'config.json: "{OURS}.{key}" must be {known[key][0].__name__}, got {value!r}')
    return dict(facts)


def spec_from_own(config: Mapping[str, Any]) -> ModelSpec:
    """Returns the spec of a folder of model_type "headway". Raises ConfigError for unknown, missing or wrong fields."""
    facts = config.get(OURS)
    if not isinstance(facts, Mapping):
        raise ConfigError(
            f'config.json: model_type "{OURS}" needs the key "{OURS}" with the fields of the spec'
        )
    facts = dict(facts)
    if (version := facts.pop("format", None)) != FORMAT:
        raise ConfigError(
            f"config.json: headway.format is {version!r}; this version of headway reads {FORMAT}"
        )
    known = [f.name for f in fields(ModelSpec) if f.init]
    for key in facts:
        check_known(key, known, f"config.json: {OURS} has no key")
    with as_error(ConfigError, f"config.json: {OURS}", TypeError):
        return _spec({key: _read(value) for key, value in facts.items()})


def _spec(facts: Mapping[str, Any]) -> ModelSpec:
    """Returns the spec with these fields. Raises ConfigError for a field of another type, and for absurd sizes."""
    hints = get_type_hints(ModelSpec)
    for field in fields(ModelSpec):
        hint = hints[field.name]
        types = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if field.name not in facts or not all(isinstance(kind, type) for kind in types):
            continue  # literals, patterns and tuples, which the spec itself checks
        value = facts[field.name]
        known = (*types, int) if float in types else types
        if not isinstance(value, known) or isinstance(value, bool) != (bool in types):
            raise ConfigError(f'config.json: "{OURS}.{field.name}" must be {field.type}, got {value!r}')
    return ModelSpec(**checked_sizes(facts))


def own_config(spec: ModelSpec) -> dict[str, Any]:
    """Returns the `config.json` of a spec that no family of transformers can express."""
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
    if type(value) in _kinds().values():
        values = {f.name: _write(getattr(value, f.name)) for f in fields(value)}
        return {"kind": type(value).__name__, **values}
    if isinstance(value, tuple | list):
        return [_write(item) for item in value]
    raise ConfigError(f"config.json cannot store a value of type {type(value).__name__}: {value!r}")


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_read(item) for item in value)
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"pattern"}:
        return parse(value["pattern"])
    name, kinds = value.get("kind"), _kinds()
    if name not in kinds:
        raise ConfigError(
            f"config.json: {OURS}: unknown kind {name!r}{did_you_mean(str(name), kinds)}; if another package defines "
            "it, import that package first"
        )
    inner = {key: _read(item) for key, item in value.items() if key != "kind"}
    return _spec(inner) if kinds[name] is ModelSpec else kinds[name](**checked_sizes(inner))
