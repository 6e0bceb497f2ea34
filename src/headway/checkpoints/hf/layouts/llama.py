"""LLaMA, Mistral, Ministral, Qwen2 and Qwen3 as `transformers` stores them (Touvron et al. 2023; Jiang et al. 2023;
Yang et al. 2024, 2025): tensors have our own names; the five differ in biases, in norms of queries and keys, and in
which layers may have a window."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from headway.checkpoints.hf.config_keys import (
    DECODER,
    ConfigReader,
    FieldMap,
    Inexpressible,
    Key,
    names,
    per_head,
    same_heads,
)
from headway.checkpoints.hf.layer_types import FULL, SLIDING, layer_types, window_keys
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.tensors import OWN_NAMES
from headway.checkpoints.hf.windows import from_foreign
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.patterns import Causal, Pattern

Windows = Literal["none", "all", "layer", "late"]
"""Where `transformers` puts windows: nowhere; in all layers (`sliding_window`); layer by layer (`layer_types`); as
"layer", or by `use_sliding_window` and `max_window_layers`."""

WINDOW_KEYS: Mapping[Windows, Mapping[str, Any]] = {
    "none": {},
    "all": {"sliding_window": 4096},
    "layer": {"sliding_window": 4096},
    "late": {"sliding_window": 4096, "use_sliding_window": None, "max_window_layers": None},
}
FIRST_WINDOW = 28
"""`max_window_layers` where it is not given."""
ONLY: Mapping[str, tuple[Any, ...]] = {
    # keys of other families, or of generic code, with the values at which they change nothing
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "use_sliding_window", "tie_encoder_decoder"), (False, None)
    ),
    **dict.fromkeys(("use_mrope", "rope_interleaved"), (False, None)),
    **dict.fromkeys(("sliding_window", "max_window_layers", "quantization_config"), (None,)),
    "cross_attention_hidden_size": (None,),
    "partial_rotary_factor": (1, 1.0, None),
    "is_decoder": (False, True, None),
    "is_llama_config": (True, None),
    **dict.fromkeys(("auto_map", "per_layer_config"), ({}, None)),
}


def read_windows(
    given: ConfigReader, windows: Windows, layers: int, usual: list[str] | None = None
) -> tuple[Pattern, ...]:
    """A pattern for each layer; `usual` are the kinds of layers where `layer_types` does not say them."""
    kinds = given.get("layer_types")
    kinds = usual if kinds is None else layer_types(kinds, layers)
    if windows in ("none", "all") and set(kinds or [FULL]) != {FULL}:
        raise ConfigError(
            f"config.json: transformers ignores layer_types for model_type {given.get('model_type')} (it lists "
            f"{', '.join(sorted(set(kinds or ())))}); ministral, qwen2 and qwen3 honour it"
        )
    size, switch = given.get("sliding_window"), given.get("use_sliding_window")
    if windows == "late" and not given.flag("use_sliding_window"):
        size = None
    windowed = from_foreign("sliding_window", size)
    if windows != "late" and switch is False and size is not None:
        raise ConfigError(
            f"config.json: use_sliding_window is false, but sliding_window is {size}, and this family has no such "
            "switch: transformers would ignore it; set sliding_window to null for no window"
        )
    if windows in ("none", "all") or (windows == "layer" and kinds is None):
        return (windowed,) * layers
    if kinds is None:
        first = given.whole("max_window_layers", FIRST_WINDOW, least=0)
        return tuple(windowed if i >= first else Causal() for i in range(layers))
    if SLIDING in kinds and size is None:
        raise ConfigError(
            "config.json: layer_types has sliding_attention layers, but there is no window "
            f"(sliding_window {given.get('sliding_window')!r}, use_sliding_window {switch!r})"
        )
    return tuple(windowed if kind == SLIDING else Causal() for kind in kinds)


def write_windows(
    spec: ModelSpec, windows: Windows, *, heads_divide: bool = False, unused: int | None = None
) -> dict[str, Any]:
    """The keys that `read_windows` reads; the width is `unused` where there are no windows."""
    if heads_divide and spec.width % spec.heads:
        raise Inexpressible("head_dim")
    keys = window_keys(spec, unused)
    kinds = keys["layer_types"]
    if windows == "none" and SLIDING not in kinds:
        return {}
    if windows == "none" or (windows == "all" and len({*kinds}) > 1):
        raise Inexpressible("windows")
    if windows == "all":
        return {"sliding_window": keys["sliding_window"]}
    if windows == "late":
        keys["use_sliding_window"] = SLIDING in kinds
        # for readers without layer_types: equal in meaning where the layers with windows come last
        keys["max_window_layers"] = kinds.index(SLIDING) if SLIDING in kinds else len(kinds)
    return keys


PER_HEAD = Key("head_dim", per_head)
FREE = Key("head_dim", per_head, written=False)
"""Where transformers honours a head_dim without having a key for it, and other readers ignore it."""
BIAS = {"qkv_bias": Key("attention_bias"), "out_bias": Key("attention_bias")}
MLP_BIAS = {"mlp_bias": Key("mlp_bias")}
NONE: Mapping[str, Any] = MappingProxyType({})


def llama_layout(
    family: str,
    architectures: str | Sequence[str],
    windows: Windows,
    context: int,
    keys: FieldMap = NONE,
    *,
    kv_heads: Any = same_heads,
    head_dim: Key = PER_HEAD,
    heads_divide: bool = False,
    usual: Callable[[ConfigReader], Callable[[int], list[str]]] | None = None,
    unused: int | None = None,
    without: Collection[str] = (),
    more: Mapping[str, Any] = NONE,
    only: Mapping[str, tuple[Any, ...]] = NONE,
    **own: Any,
) -> Layout:
    """A layout like LLaMA's: `keys`, `more` and `only` go beside or before those that all share, `own` are other fields
    of `Layout`; `without` are fields that are no keys, `heads_divide` is whether transformers insists on a width that
    is a multiple of the heads. `usual` are the kinds of so many layers where `layer_types` do not say them, `unused` is
    the width of windows where there are none."""
    every = {
        **DECODER,
        "activation": Key("hidden_act", "silu"),
        "kv_heads": Key("num_key_value_heads", kv_heads),
        "head_dim": head_dim,
        "norm_eps": Key("rms_norm_eps"),
        **keys,
    }
    every = {field: key for field, key in every.items() if field not in without}
    classes = (architectures,) if isinstance(architectures, str) else architectures
    more = {"max_position_embeddings": context, "layer_types": None, **WINDOW_KEYS[windows], **more}
    parts = (name for part in own.get("parts", ()) for name in part.keys)
    taken = (*names(every), *more, *parts, *own.get("harmless", ()))
    heads, tensors = dict.fromkeys(classes, "lm"), OWN_NAMES
    if own.get("generic"):  # the class without an output layer, which embedders are saved as
        heads |= {name.replace("ForCausalLM", "Model"): "states" for name in classes}
        tensors = replace(OWN_NAMES, prefix="model.", heads=("lm_head.",))

    def read(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        layers = fields["layers"]
        kinds = usual(given)(layers) if usual and given.get("layer_types") is None else None
        return {"patterns": read_windows(given, windows, layers, kinds)}

    shared: dict[str, Any] = {
        "rope": "",
        "read": read,
        "write": partial(write_windows, windows=windows, heads_divide=heads_divide, unused=unused),
        "tensors": tensors,
    }
    return Layout(
        family=family,
        architectures=heads,
        keys=every,
        more=more,
        only={key: at for key, at in {**ONLY, **only}.items() if key not in taken},
        **{**shared, **own},
    )


_generic = partial(llama_layout, generic=True)
LLAMA = _generic("llama", "LlamaForCausalLM", "none", 2048, {**BIAS, **MLP_BIAS}, heads_divide=True)
MISTRAL = _generic("mistral", "MistralForCausalLM", "all", 131072, kv_heads=8)
MINISTRAL = _generic("ministral", "MinistralForCausalLM", "layer", 131072, kv_heads=8)
QWEN2 = _generic("qwen2", "Qwen2ForCausalLM", "late", 32768, kv_heads=32, head_dim=FREE)
QWEN3 = _generic("qwen3", "Qwen3ForCausalLM", "late", 32768, BIAS, kv_heads=32, head_dim=Key("head_dim", 128))
