"""From `ModelSpec` to `config.json`: as the family of transformers that can say it, else as model_type
"headway"."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

from headway.checkpoints.hf.config import LAYER_TYPES, spec_from_config
from headway.checkpoints.hf.families import FAMILIES, OURS, Family
from headway.checkpoints.hf.headway_config import FACTS, own_config
from headway.checkpoints.hf.layouts import layout_of
from headway.checkpoints.hf.rope import write_rope
from headway.checkpoints.hf.windows import last_keys
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.patterns import Causal, Pattern, Window
from headway.positions import Rotary

BLOCKS = (
    *(
        "causal",
        "encoder",
        "shared_embedding",
        "head",
        "order",
        "norm",
        "norm_bias",
        "final_norm",
        "embedding_norm",
    ),
    *("embedding_width", "embedding_scale", "logit_scale", "token_types", "output_bias", "attention_scale"),
    *("global_projections", "linear", "gated", "dropout", "activation_dropout"),
)


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of a spec; `spec_from_config` of it is the spec again (patterns in their shortest
    form).

    The family is the spec's own where that can say the spec, else the first of `FAMILIES` that can. A spec
    that transformers would only misread (adjacent pairing, sinks, windows of several sizes) gets the
    model_type "headway", which transformers refuses.
    """
    spec = _shortest(spec)
    own = [spec.family] if spec.family in FAMILIES else []
    layout = layout_of(spec.family)
    llamas = {name: partial(_plain, spec, name, FAMILIES[name]) for name in (*own, *FAMILIES)}
    for make in llamas.values() if layout is None else [partial(layout.config, spec)]:
        config = make()
        if config is None:
            continue
        try:
            back = spec_from_config(config)
            facts = {key: getattr(spec, key) for key in FACTS if getattr(spec, key) != getattr(back, key)}
            same = not _differences(spec, replace(back, **facts))
        except ConfigError:  # what cannot be there, such as no token types
            continue
        if same:
            return {**config, OURS: facts} if facts else config
    return own_config(spec)


def why_not_plain(spec: ModelSpec) -> str | None:
    """What keeps transformers from saying a spec, None when it can."""
    if config_from_spec(spec)["model_type"] != OURS:
        return None
    spec = _shortest(spec)
    if (layout := layout_of(spec.family)) is not None:
        said = layout.config(spec)
        if said is None:
            return "head" if (spec.encoder is None) == (layout.encoder_keys is None) else "encoder"
        try:
            return _said_otherwise(spec, spec_from_config(said))
        except ConfigError as error:
            return f"spec ({str(error).removeprefix('config.json: ')})"
    if not _is_llama(spec):
        return f"family ({spec.family})"
    turned = isinstance(spec.positions, Rotary) and spec.positions.pairing != "halves"
    best: list[str] | None = None
    for name, family in FAMILIES.items():
        config = _plain(replace(spec, positions=_sayable(spec.positions)), name, family)
        if config is None:
            continue
        back = spec_from_config(config)
        differ = [d for d in _differences(spec, back) if d not in FACTS]
        if best is None or len(differ) < len(best):
            best = differ
    return ", ".join(["rotary pairing" if turned and d == "positions" else d for d in best or ["windows"]])


def _said_otherwise(spec: ModelSpec, other: ModelSpec) -> str:
    return ", ".join(name for name in _differences(spec, other) if name not in FACTS)


def _sayable(positions: Any) -> Rotary:
    if not isinstance(positions, Rotary):
        return Rotary(pairing="halves")
    return replace(positions, pairing="halves", dims=None)


def _shortest(spec: ModelSpec) -> ModelSpec:
    """The same spec with patterns and positions in the form that a config is read into."""
    positions = spec.positions
    if isinstance(positions, Rotary) and positions.dims == spec.head_dim:
        positions = replace(positions, dims=None)
    return replace(spec, patterns=tuple(_short(p) for p in spec.patterns), positions=positions)


def _short(pattern: Pattern) -> Pattern:
    try:
        keys = last_keys(pattern)
    except ConfigError:
        return pattern
    return Causal() if keys is None else Window.last(keys)


def _differences(spec: ModelSpec, other: ModelSpec) -> list[str]:
    return [f.name for f in fields(ModelSpec) if f.init and getattr(spec, f.name) != getattr(other, f.name)]


def _plain(spec: ModelSpec, name: str, family: Family) -> dict[str, Any] | None:
    """The config of a family for as much of the spec as it can say; None where transformers would refuse
    it."""
    if not _is_llama(spec):
        return None
    divides = spec.width % spec.heads == 0
    rotary = spec.positions
    if not isinstance(rotary, Rotary) or (family.heads_divide and not divides):
        return None
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": name,
        "vocab_size": spec.vocab,
        "hidden_size": spec.width,
        "intermediate_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "hidden_act": spec.activation,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        **write_rope(rotary, spec.trained_context),
        "attention_dropout": spec.attention_dropout,
        "initializer_range": spec.init_std,
        "use_cache": True,
    }
    if family.head_dim_key:
        config["head_dim"] = spec.head_dim
    elif not divides or spec.head_dim != spec.width // spec.heads:
        return None
    for switch, answer in ((family.qkv_bias, spec.qkv_bias), (family.mlp_bias, spec.mlp_bias)):
        if isinstance(switch, str):
            config[switch] = answer
    return config if _place_windows(config, spec, family) else None


def _is_llama(spec: ModelSpec) -> bool:
    """Whether the blocks are LLaMA's, which all of `FAMILIES` have."""
    usual = {f.name: f.default for f in fields(ModelSpec) if f.name in BLOCKS}
    return all(getattr(spec, name) == value for name, value in usual.items())


def _place_windows(config: dict[str, Any], spec: ModelSpec, family: Family) -> bool:
    windows = [p.before + 1 if isinstance(p, Window) else None for p in spec.patterns]
    sizes = {w for w in windows if w is not None}
    if len(sizes) > 1 or (sizes and family.windows == "none"):
        return False
    if family.windows == "none":
        return True
    if family.windows == "all" and sizes and None in windows:
        return False
    config["sliding_window"] = sizes.pop() if sizes else None
    if family.windows == "all":
        return True
    if family.windows == "late":
        config["use_sliding_window"] = config["sliding_window"] is not None
        # readers that do not know layer_types go by this; it says the same where windows come last
        config["max_window_layers"] = next((i for i, w in enumerate(windows) if w is not None), len(windows))
    config["layer_types"] = [LAYER_TYPES[0] if w is None else LAYER_TYPES[1] for w in windows]
    return True
