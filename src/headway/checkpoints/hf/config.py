"""From `config.json` to `ModelSpec`, by the tables of `families`, `rope` and `windows`. The way back is
`config_out`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.checkpoints.hf.config_reader import ConfigReader
from headway.checkpoints.hf.families import FAMILIES, HARMLESS, ONLY, OURS, Family
from headway.checkpoints.hf.headway_config import own_facts, spec_from_own
from headway.checkpoints.hf.layouts import LAYOUTS, layout_of
from headway.checkpoints.hf.rope import read_rope
from headway.checkpoints.hf.size_limits import checked_sizes
from headway.checkpoints.hf.windows import from_foreign
from headway.errors import ConfigError, did_you_mean
from headway.models import ModelSpec
from headway.patterns import Causal, Pattern, Window

LAYER_TYPES = ("full_attention", "sliding_attention")


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec that a `config.json` describes.

    Raises ConfigError, naming key and value, for a family that is not known, a key that is not known (with
    the nearest one that is), a key with a value that would be ignored, and values that contradict each other.
    """
    if config.get("model_type") == OURS:
        return spec_from_own(config)
    if (layout := LAYOUTS.get(str(config.get("model_type")))) is not None:
        facts = own_facts(config)
        if layout_of(family := facts.get("family", layout.family)) is not layout:
            raise ConfigError(
                f'config.json: "{OURS}.family" is {family!r}, whose folders are not of model_type {layout.family!r}'
            )
        return replace(layout.spec(config), **facts)
    family_name = _family_of(config)
    family = FAMILIES[family_name]
    _check_keys(config, family_name, family)
    facts = own_facts(config)
    given = ConfigReader(config, family.defaults)
    shape = _shape(given)
    rope = read_rope(config, max_positions=given.whole("max_position_embeddings"), head_dim=shape["head_dim"])
    return ModelSpec(
        family=facts.get("family", family_name),
        **shape,
        patterns=_patterns(given, family, shape["layers"]),
        positions=rope.rotary,
        qkv_bias=given.switch(family.qkv_bias),
        out_bias=given.switch(family.out_bias),
        mlp_bias=given.switch(family.mlp_bias),
        qk_norm=family.qk_norm,
        trained_context=facts.get("trained_context", rope.context),
        max_context=facts.get("max_context"),
        attention_dropout=given.number("attention_dropout", 0.0),
        init_std=given.number("initializer_range", 0.02),
    )


def _family_of(config: Mapping[str, Any]) -> str:
    name: Any = config.get("model_type")
    classes = config.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise ConfigError(f'config.json: "architectures" must be a list of names, got {classes!r}')
    by_class = {family.architecture: key for key, family in FAMILIES.items()}
    if name is None and len(classes) == 1 and classes[0] in by_class:
        name = by_class[classes[0]]
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join([*FAMILIES, *LAYOUTS])
        raise ConfigError(
            f"config.json: model_type {name!r} is not a family that headway knows"
            f"{did_you_mean(str(name), [*FAMILIES, *LAYOUTS])}; known are {known}"
        )
    if classes and FAMILIES[name].architecture not in classes:
        raise ConfigError(
            f"config.json: architectures {classes} is not a decoder of model_type {name!r} "
            f"(expected {FAMILIES[name].architecture})"
        )
    return str(name)


def _check_keys(config: Mapping[str, Any], name: str, family: Family) -> None:
    translated = family.translated
    for key, value in config.items():
        if key in translated or key in HARMLESS:
            continue
        if key == "layer_types" and value is not None:
            layers = config.get("num_hidden_layers", family.defaults.get("num_hidden_layers"))
            if (kinds := set(_layer_types(value, layers))) - {"full_attention"}:
                raise ConfigError(
                    f"config.json: transformers ignores layer_types for model_type {name} (it lists "
                    f"{', '.join(sorted(kinds))}); ministral, qwen2 and qwen3 honour it"
                )
        elif key not in ONLY:
            hint = did_you_mean(key, [*translated, *HARMLESS, *ONLY])
            raise ConfigError(
                f'config.json: unknown key "{key}"{hint} for model_type {name}; remove it if it does not change '
                "what the model computes"
            )
        elif value not in ONLY[key]:
            raise ConfigError(
                f'config.json: "{key}" is {value!r}, which means nothing to model_type {name}: it would be ignored; '
                f"accepted is {' or '.join(map(repr, ONLY[key]))}"
            )


def _shape(given: ConfigReader) -> dict[str, Any]:
    width, heads = given.whole("hidden_size"), given.whole("num_attention_heads")
    if given.get("head_dim") is None and width % heads:
        raise ConfigError(
            f"config.json: hidden_size {width} is not a multiple of num_attention_heads {heads}, "
            "and head_dim is not given"
        )
    sizes = {
        "vocab": given.whole("vocab_size"),
        "width": width,
        "layers": given.whole("num_hidden_layers"),
        "heads": heads,
        "kv_heads": given.whole("num_key_value_heads", heads),
        "head_dim": given.whole("head_dim", width // heads),
        "hidden": given.whole("intermediate_size"),
        "norm_eps": given.number("rms_norm_eps"),
        "activation": given.text("hidden_act", "silu"),
        "tied": given.flag("tie_word_embeddings"),
    }
    return checked_sizes(sizes)


def _patterns(given: ConfigReader, family: Family, layers: int) -> tuple[Pattern, ...]:
    if family.windows == "none":
        return (Causal(),) * layers
    if family.windows == "late" and not given.flag("use_sliding_window"):
        windowed: Pattern = Causal()
    else:
        windowed = from_foreign("huggingface sliding_window", given.get("sliding_window"))
    if family.windows != "late" and given.get("use_sliding_window") is False and windowed != Causal():
        raise ConfigError(
            f"config.json: use_sliding_window is false, but sliding_window is {given.get('sliding_window')}, and this "
            "family has no such switch: transformers would ignore it; set sliding_window to null for no window"
        )
    if family.windows == "all":
        return (windowed,) * layers
    kinds = given.get("layer_types")
    if kinds is None and family.windows == "layer":
        return (windowed,) * layers
    if kinds is None:
        first = given.get("max_window_layers")
        if first is None:
            first = 28
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ConfigError(f'config.json: "max_window_layers" must be a whole number, got {first!r}')
        return tuple(windowed if i >= first else Causal() for i in range(layers))
    kinds = _layer_types(kinds, layers)
    if "sliding_attention" in kinds and not isinstance(windowed, Window):
        raise ConfigError(
            "config.json: layer_types has sliding_attention layers, but there is no window "
            f"(sliding_window {given.get('sliding_window')!r}, use_sliding_window {given.get('use_sliding_window')!r})"
        )
    return tuple(windowed if kind == "sliding_attention" else Causal() for kind in kinds)


def _layer_types(kinds: object, layers: object) -> list[str]:
    """`layer_types` as a list of known kinds, one per layer."""
    if not isinstance(kinds, list):
        raise ConfigError(
            f'config.json: "layer_types" must be a list with one of {", ".join(LAYER_TYPES)} per layer, got {kinds!r}'
        )
    if len(kinds) != layers:
        raise ConfigError(
            f"config.json: layer_types lists {len(kinds)} layers, but num_hidden_layers is {layers}"
        )
    for number, kind in enumerate(kinds):
        if kind not in LAYER_TYPES:
            hint = did_you_mean(str(kind), LAYER_TYPES)
            raise ConfigError(
                f"config.json: layer_types[{number}] is {kind!r}{hint}; known are {', '.join(LAYER_TYPES)}"
            )
    return kinds
