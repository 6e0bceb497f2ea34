"""LLaMA, Mistral, Ministral, Qwen2 and Qwen3 as `transformers` stores them (Touvron et al. 2023; Jiang et al. 2023;
Yang et al. 2024, 2025): tensors have our own names; the five differ in biases, in norms of queries and keys, and in
which layers may have a window."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from headway.checkpoints.hf.config_keys import DECODER, FieldMap, Key, names, per_head, same_heads
from headway.checkpoints.hf.layouts.base import Layout, Part
from headway.checkpoints.hf.layouts.experts import ExpertKeys
from headway.checkpoints.hf.layouts.parts import Windows, windows
from headway.checkpoints.hf.layouts.rules import decoder_names
from headway.checkpoints.hf.layouts.tensors import OWN_NAMES
from headway.checkpoints.hf.windows import Kinds

ONLY: Mapping[str, tuple[Any, ...]] = {
    # keys of other families, or of generic code, with the values at which they have no effect
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


PER_HEAD = Key("head_dim", per_head)
FREE = Key("head_dim", per_head, written=False)
"""For families of which transformers reads a head_dim but does not write it, and other readers ignore it."""
BIAS = {"qkv_bias": Key("attention_bias"), "out_bias": Key("attention_bias")}
MLP_BIAS = {"mlp_bias": Key("mlp_bias")}
NONE: Mapping[str, Any] = MappingProxyType({})
block_names = partial(decoder_names, "", "model.embed_tokens", "model.norm", "model.layers.#.")
"""Our names, except for the modules of a layer, whose names are the argument."""


def llama_layout(
    family: str,
    architectures: str | Sequence[str],
    where: Windows | None,
    context: int,
    keys: FieldMap = NONE,
    *,
    kv_heads: Any = same_heads,
    head_dim: Key = PER_HEAD,
    heads_divide: bool = False,
    usual: Kinds | None = None,
    unused: int | None = None,
    experts: ExpertKeys | None = None,
    without: Collection[str] = (),
    more: Mapping[str, Any] = NONE,
    only: Mapping[str, tuple[Any, ...]] = NONE,
    harmless: Sequence[str] = (),
    parts: Sequence[Part] = (),
    **overrides: Any,
) -> Layout:
    """Returns a layout like LLaMA's: `keys`, `more` and `only` add to those that all share, or override them; `without`
    are fields that have no key, `overrides` other fields of `Layout`. `where`, `usual`, `unused` and `heads_divide` are
    as in `windows`; if `where` is None, `parts` read the attention patterns. `experts` are the keys of experts, if
    layers may have some."""
    every = {
        **DECODER,
        "activation": Key("hidden_act", "silu"),
        "kv_heads": Key("num_key_value_heads", kv_heads),
        "head_dim": head_dim,
        "norm_eps": Key("rms_norm_eps"),
        **keys,
    }
    without = (*without, *(() if experts is None else ("hidden",)))
    every = {field: key for field, key in every.items() if field not in without}
    harmless = (*(() if experts is None else experts.harmless), *harmless)
    classes = (architectures,) if isinstance(architectures, str) else architectures
    more = {"max_position_embeddings": context, "layer_types": None, **more}
    window_parts = () if where is None else (windows(where, usual, unused=unused, heads_divide=heads_divide),)
    parts = (*window_parts, *(() if experts is None else (experts.part,)), *parts)
    used = (*names(every), *more, *(name for part in parts for name in part.keys), *harmless)
    heads, tensors = dict.fromkeys(classes, "lm"), OWN_NAMES
    if overrides.get("generic"):  # add the class without an output layer, as which embedders are saved
        heads |= {name.replace("ForCausalLM", "Model"): "states" for name in classes}
        tensors = replace(OWN_NAMES, prefix="model.", heads=("lm_head.",))
    return Layout(
        family=family,
        architectures=heads,
        keys=every,
        more=more,
        only={key: at for key, at in {**ONLY, **only}.items() if key not in used},
        harmless=harmless,
        parts=parts,
        **{"rope": "", "tensors": tensors, **overrides},
    )


_generic = partial(llama_layout, generic=True)
LLAMA = _generic("llama", "LlamaForCausalLM", "none", 2048, {**BIAS, **MLP_BIAS}, heads_divide=True)
MISTRAL = _generic("mistral", "MistralForCausalLM", "all", 131072, kv_heads=8)
MINISTRAL = _generic("ministral", "MinistralForCausalLM", "layer", 131072, kv_heads=8)
QWEN2 = _generic("qwen2", "Qwen2ForCausalLM", "late", 32768, kv_heads=32, head_dim=FREE)
QWEN3 = _generic("qwen3", "Qwen3ForCausalLM", "late", 32768, BIAS, kv_heads=32, head_dim=Key("head_dim", 128))
