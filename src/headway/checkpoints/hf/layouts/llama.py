"""LLaMA, Mistral, Ministral, Qwen2 and Qwen3 as `transformers` stores them (Touvron et al. 2023; Jiang et al. 2023;
Yang et al. 2024, 2025): tensors have our own names; the five differ in biases, in norms of queries and keys, and in
which layers may have a window."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from headway.checkpoints.hf.config_keys import (
    DECODER,
    ConfigReader,
    FieldMap,
    Key,
    names,
    per_head,
    same_heads,
)
from headway.checkpoints.hf.layouts.base import Inexpressible, Layout
from headway.checkpoints.hf.layouts.tensors import OWN_NAMES
from headway.checkpoints.hf.windows import from_foreign, last_keys
from headway.errors import ConfigError, check_known
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
LAYER_TYPES = ("full_attention", "sliding_attention")
ONLY: Mapping[str, tuple[Any, ...]] = {
    # keys of other families, or of generic code, with the values at which they change nothing
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "max_window_layers": (None,),
    "partial_rotary_factor": (1, 1.0, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "is_decoder": (False, True, None),
    "use_mrope": (False, None),
    "rope_interleaved": (False, None),
    "is_llama_config": (True, None),
    "auto_map": ({}, None),
    "quantization_config": (None,),
    "per_layer_config": ({}, None),
}


def _patterns(given: ConfigReader, windows: Windows, layers: int) -> tuple[Pattern, ...]:
    kinds = given.get("layer_types")
    kinds = None if kinds is None else _layer_types(kinds, layers)
    if windows in ("none", "all") and set(kinds or LAYER_TYPES[:1]) != {LAYER_TYPES[0]}:
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
    if "sliding_attention" in kinds and size is None:
        raise ConfigError(
            "config.json: layer_types has sliding_attention layers, but there is no window "
            f"(sliding_window {given.get('sliding_window')!r}, use_sliding_window {switch!r})"
        )
    return tuple(windowed if kind == "sliding_attention" else Causal() for kind in kinds)


def _layer_types(kinds: object, layers: int) -> list[str]:
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
        check_known(kind, LAYER_TYPES, f"config.json: layer_types[{number}] is", are="known are")
    return kinds


def _write(spec: ModelSpec, *, windows: Windows, heads_divide: bool) -> dict[str, Any]:
    if heads_divide and spec.width % spec.heads:
        raise Inexpressible("head_dim")
    each = [last_keys(pattern) for pattern in spec.patterns]
    sizes = {size for size in each if size is not None}
    if windows == "none" and not sizes:
        return {}
    if len(sizes) > 1 or windows == "none" or (windows == "all" and sizes and None in each):
        raise Inexpressible("windows")
    keys: dict[str, Any] = {"sliding_window": sizes.pop() if sizes else None}
    if windows == "all":
        return keys
    if windows == "late":
        keys["use_sliding_window"] = keys["sliding_window"] is not None
        # for readers without layer_types: equal in meaning where the layers with windows come last
        keys["max_window_layers"] = next((i for i, w in enumerate(each) if w is not None), len(each))
    return {**keys, "layer_types": [LAYER_TYPES[0] if w is None else LAYER_TYPES[1] for w in each]}


PER_HEAD = Key("head_dim", per_head)


def _layout(
    family: str,
    architecture: str,
    windows: Windows,
    context: int,
    biases: FieldMap = MappingProxyType({}),
    *,
    kv_heads: Any = same_heads,
    head_dim: Key = PER_HEAD,
    heads_divide: bool = False,
) -> Layout:
    """One of them: `biases` are the keys that switch biases on; `heads_divide` is whether transformers insists on a
    width that is a multiple of the heads."""
    own = {
        "kv_heads": Key("num_key_value_heads", kv_heads),
        "head_dim": head_dim,
        "norm_eps": Key("rms_norm_eps"),
    }
    keys = {**DECODER, "activation": Key("hidden_act", "silu"), **own, **biases}
    return Layout(
        family=family,
        architectures={architecture: "lm"},
        keys=keys,
        more={"max_position_embeddings": context, "layer_types": None, **WINDOW_KEYS[windows]},
        only={key: at for key, at in ONLY.items() if key not in (*names(keys), *WINDOW_KEYS[windows])},
        rope="",
        read=lambda given, kind, fields: {"patterns": _patterns(given, windows, fields["layers"])},
        write=partial(_write, windows=windows, heads_divide=heads_divide),
        tensors=OWN_NAMES,
        generic=True,
    )


_BIAS = {"qkv_bias": Key("attention_bias"), "out_bias": Key("attention_bias")}

LLAMA = _layout(
    *("llama", "LlamaForCausalLM", "none", 2048), {**_BIAS, "mlp_bias": Key("mlp_bias")}, heads_divide=True
)
MISTRAL = _layout("mistral", "MistralForCausalLM", "all", 131072, kv_heads=8)
MINISTRAL = _layout("ministral", "MinistralForCausalLM", "layer", 131072, kv_heads=8)
# transformers honours a head_dim of Qwen2 without having a key for it, and others ignore it
_FREE = Key("head_dim", per_head, written=False)
QWEN2 = _layout("qwen2", "Qwen2ForCausalLM", "late", 32768, kv_heads=32, head_dim=_FREE)
QWEN3 = _layout("qwen3", "Qwen3ForCausalLM", "late", 32768, _BIAS, kv_heads=32, head_dim=Key("head_dim", 128))
