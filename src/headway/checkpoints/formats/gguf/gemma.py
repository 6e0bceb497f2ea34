"""The Gemmas in GGUF.

llama.cpp fixes some numbers of Gemma 3n (src/models/gemma3n.cpp), and no key changes them: four streams, ranks of 64,
256 columns of per-layer embeddings, sparse gates in the first ten layers, keys of their own in the first twenty. Gemma
4 has separate keys for the head sizes of layers with windows, lists of kv heads and feed-forward widths, and no attn_v
in layers whose values are their keys (src/models/gemma4.cpp). In both, layers that share keys take them from the last
two layers that compute their own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal

from headway.checkpoints.formats.gguf.layout import (
    HEAD_DIMS,
    MARKS,
    SIZES,
    TIED_VALUES,
    Fields,
    Schemes,
    gguf_layout,
)
from headway.checkpoints.formats.gguf.mixers import KV_HEADS, each_layer
from headway.checkpoints.formats.gguf.rope import THETA
from headway.checkpoints.hf.config_keys import ConfigReader, Inexpressible, Key
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.gemma import softmax_by_layer
from headway.checkpoints.hf.layouts.rules import Rule
from headway.checkpoints.hf.windows import FULL, SLIDING
from headway.models import ModelSpec
from headway.patterns import Causal, Pattern
from headway.positions import Rotary

LOCAL_BASE = "rope.freq_base_swa"


def local_base(usual: float | None) -> Schemes:
    """Returns schemes in which layers with windows have a rotary base of their own, by default `usual` or that of the
    others, and no scaling."""
    return lambda rotary, keys: (
        replace(rotary, theta=keys.number(LOCAL_BASE, usual or rotary.theta), scaling=None),
        rotary,
    )


def write_local_base(spec: ModelSpec) -> dict[str, Any]:
    """Returns the rotary base of layers with windows; None if there are none."""
    layers = zip(spec.layer_positions, spec.patterns, strict=True)
    bases = (scheme.theta for scheme, pattern in layers if pattern != Causal() and isinstance(scheme, Rotary))
    return {LOCAL_BASE: next(bases, None)}


def scale_of_27b(layers: int) -> Fields:
    """Returns a function that scales attention scores by (width / heads)^-0.5 in models of `layers` layers, else by
    D^-0.5 (the default)."""
    return lambda keys, fields: {
        "attention_scale": (fields["width"] // fields["heads"]) ** -0.5
        if fields["layers"] == layers
        else None
    }


POST = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
SANDWICH = {**POST, "pre_feedforward_layernorm": "ffn_norm"}

OWN_KEYS, CUT_LAYERS, CUT = 20, 10, 0.95
"""For Gemma 3n: number of layers with keys of their own, number of layers with sparse gates, and the share of their
gates that is cut to zero."""
SHARED_KV, CUTS = "attention.shared_kv_layers", "activation_sparsity_scale"
LAYER = "model.layers.#."
PER_LAYER = {"per_layer.gate": "inp_gate", "per_layer.proj": "proj", "per_layer.norm": "post_norm"}
TOP = {
    "model.per_layer.embed_tokens": "per_layer_token_embd",
    "model.per_layer.proj": "per_layer_model_proj",
    "model.per_layer.norm": "per_layer_proj_norm",
}
ALTUP = {
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}
COEFFICIENTS = {
    "correct_output_scale": "altup_correct_scale",
    "correction_coefs": "altup_correct_coef",
    "prediction_coefs": "altup_predict_coef",
}
UNUSED = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
"""Tensors of layers that attend to keys of other layers, which llama.cpp requires and does not use."""
STREAMS = [
    *(
        Rule(tuple(f"model.streams.{way}.{i}.weight" for i in range(3)), f"{name}.weight", stacked=3)
        for way, name in (("into", "altup_proj"), ("out", "altup_unembd_proj"))
    ),
    *(Rule((f"{LAYER}altup.{a}",), f"blk.#.{b}.weight") for a, b in COEFFICIENTS.items()),
]


def _cuts(layers: int) -> tuple[float, ...]:
    """Returns the share of gates that each layer cuts to zero."""
    return tuple(CUT if i < CUT_LAYERS else 0.0 for i in range(layers))


def _deviations(layers: int) -> list[float]:
    """Returns the cut-off of each layer's gates, in standard deviations above their mean."""
    deviations: list[float] = Normal(0.0, 1.0).icdf(torch.tensor(_cuts(layers))).tolist()
    return deviations


def _kinds(patterns: Sequence[Pattern]) -> list[str]:
    return [FULL if pattern == Causal() else SLIDING for pattern in patterns]


def _shares_well(kinds: Sequence[str], own: int = OWN_KEYS) -> bool:
    """Returns whether the last two of the first `own` layers, whose keys any others share, have a window and none."""
    return len(kinds) <= own or [*kinds[max(own - 2, 0) : own]] == [SLIDING, FULL]


def read_3n(keys: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that follow from the number of layers and from which of them have windows. Raises ConfigError
    for keys that contradict them."""
    layers, kinds = fields["layers"], _kinds(fields["patterns"])
    shared, deviations = max(layers - OWN_KEYS, 0), _deviations(layers)
    cuts = keys.get(CUTS) or deviations
    if keys.whole(SHARED_KV, shared, least=0) != shared:
        raise keys.wrong(SHARED_KV, f"{shared} of {layers} layers", keys.get(SHARED_KV))
    if len(cuts) != layers or not torch.allclose(torch.tensor(cuts), torch.tensor(deviations)):
        raise keys.wrong(CUTS, f"{deviations}, which llama.cpp uses", cuts)
    if not _shares_well(kinds):
        raise keys.wrong(MARKS, f"a window in layer {OWN_KEYS - 2} and none in the next", keys.get(MARKS))
    mixers = softmax_by_layer(keys, kinds, [{}] * layers, shared)
    return {"mixers": mixers, "mlp_sparsity": _cuts(layers), "laurel": 64, "per_layer_embedding": 256}


def unused_keys(spec: ModelSpec) -> dict[str, Tensor]:
    """Returns zeros for the tensors that no layer of a Gemma 3n uses and llama.cpp requires: name -> value."""
    if spec.altup is None:
        return {}
    rows = spec.kv_heads * spec.head_dim
    shapes = dict(zip(UNUSED, (*[(rows, spec.width)] * 2, (spec.head_dim,)), strict=True))
    layers = [i for i, source in enumerate(spec.key_layers) if source != i]
    return {f"blk.{i}.{name}": torch.zeros(shape) for i in layers for name, shape in shapes.items()}


def write_3n(spec: ModelSpec) -> dict[str, Any]:
    """Returns the keys of a Gemma 3n, also of what llama.cpp fixes: reading them again shows whether the spec differs
    from that. Raises Inexpressible if shared keys are not those of the last two layers with their own."""
    if not _shares_well(_kinds(spec.patterns)):
        raise Inexpressible("patterns")
    return {
        MARKS: [pattern != Causal() for pattern in spec.patterns],
        SIZES["hidden"]: [spec.hidden] * spec.layers,
        SHARED_KV: max(spec.layers - OWN_KEYS, 0),
        CUTS: _deviations(spec.layers),
        **write_local_base(spec),
    }


SWA_DIMS = ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")
COLUMNS = "embedding_length_per_layer_input"
SCALAR = Rule((f"{LAYER}layer_scalar",), "blk.#.layer_output_scale.weight")


def _widths(narrow: int, layers: int, own: int) -> list[int]:
    """Returns the feed-forward width of each layer: twice as wide in layers that share keys."""
    return [narrow if i < own else 2 * narrow for i in range(layers)]


def read_4(keys: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes of each layer: its kv heads, the head size of its kind (with or without a window), and its
    feed-forward width, which is doubled in all layers that share keys, or in none."""
    layers, kinds, of_full = fields["layers"], _kinds(fields["patterns"]), fields["head_dim"]
    kv_heads, widths = each_layer(keys, KV_HEADS, layers), each_layer(keys, SIZES["hidden"], layers)
    of_local = {keys.whole(key, of_full) for key in SWA_DIMS}
    if len(of_local) > 1:
        raise keys.wrong(SWA_DIMS[0], f"the number of {' and '.join(SWA_DIMS[1:])}", keys.get(SWA_DIMS[0]))
    local = of_local.pop()
    shared, narrow = keys.whole(SHARED_KV, 0, least=0), min(widths)
    own, wide = layers - shared, max(widths) > narrow
    if not _shares_well(kinds, own):
        raise keys.wrong(SHARED_KV, f"a window in layer {own - 2} and none in the next", shared)
    if wide and widths != _widths(narrow, layers, own):
        raise keys.wrong(SIZES["hidden"], f"one width, and twice that from layer {own} on", widths)
    sizes = [
        {"head_dim": of_full if kind == FULL else local, "kv_heads": heads}
        for kind, heads in zip(kinds, kv_heads, strict=True)
    ]
    return {
        "mixers": softmax_by_layer(keys, kinds, sizes, shared, bool(keys.config.get(TIED_VALUES))),
        "head_dim": local,
        "kv_heads": kv_heads[kinds.index(SLIDING)] if SLIDING in kinds else kv_heads[0],
        "hidden": narrow,
        "layer_hidden": tuple(_widths(narrow, layers, own)) if wide else (0,),
        "per_layer_embedding": keys.whole(COLUMNS, 0, least=0),
    }


def _one_or_all(sizes: list[int]) -> int | list[int]:
    return sizes if len({*sizes}) > 1 else sizes[0]


def write_4(spec: ModelSpec) -> dict[str, Any]:
    """Returns the keys of each layer's sizes. Raises Inexpressible if shared keys are not those of the last two layers
    with their own, if layers of one kind have several head sizes, and for feed-forward widths that `read_4` refuses."""
    kinds = _kinds(spec.patterns)
    kv_heads, widths = [kv for kv, _ in spec.key_sizes], [spec.hidden_of(i) for i in range(spec.layers)]
    dims = {kind: {d for k, (_, d) in zip(kinds, spec.key_sizes, strict=True) if k == kind} for kind in kinds}
    shared = sum(i != source for i, source in enumerate(spec.key_layers))
    if not _shares_well(kinds, spec.layers - shared):
        raise Inexpressible("patterns")
    if any(len(sizes) > 1 for sizes in dims.values()):
        raise Inexpressible("mixers")
    if len({*widths}) > 1 and widths != _widths(spec.hidden, spec.layers, spec.layers - shared):
        raise Inexpressible("layer_hidden")
    local, full = (next(iter(dims.get(kind, {spec.head_dim}))) for kind in (SLIDING, FULL))
    return {
        MARKS: [kind == SLIDING for kind in kinds],
        KV_HEADS: _one_or_all(kv_heads),
        SIZES["hidden"]: _one_or_all(widths),
        SHARED_KV: shared,
        COLUMNS: spec.per_layer_embedding,
        **dict.fromkeys(HEAD_DIMS, full),
        **dict.fromkeys(SWA_DIMS, local),
        **write_local_base(spec),
    }


GEMMAS: Mapping[str, Layout] = {
    "gemma": gguf_layout("gemma", "halves", tied=True),
    "gemma2": gguf_layout(
        *("gemma2", "halves"),
        modules=SANDWICH,
        tied=True,
        numbers={
            "score_cap": Key("attn_logit_softcapping", 50.0),
            "logit_cap": Key("final_logit_softcapping", 30.0),
        },
        every=2,
        further=scale_of_27b(46),
    ),
    "gemma3": gguf_layout(
        *("gemma3", "halves"),
        family="gemma3_text",
        modules=SANDWICH,
        numbers={"logit_cap": Key("final_logit_softcapping")},
        every=6,
        schemes=local_base(THETA),
        more=(LOCAL_BASE,),
        further=scale_of_27b(62),
        written=write_local_base,
    ),
    "gemma3n": gguf_layout(
        *("gemma3n", "halves"),
        family="gemma3n_text",
        modules={**SANDWICH, **PER_LAYER, **ALTUP},
        top=TOP,
        tensors=STREAMS,
        unused=UNUSED,
        tied=True,
        only={
            "altup.num_inputs": (4,),
            "altup.active_idx": (0,),
            "embedding_length_per_layer_input": (256,),
            "final_logit_softcapping": (30.0,),
        },
        every=5,
        schemes=local_base(THETA),
        more=(LOCAL_BASE, SHARED_KV, CUTS),
        further=read_3n,
        written=write_3n,
    ),
    "gemma4": gguf_layout(
        *("gemma4", "halves"),
        family="gemma4_text",
        modules={**SANDWICH, **PER_LAYER},
        top=TOP,
        tensors=(SCALAR,),
        unused=UNUSED,
        sized=True,
        numbers={"logit_cap": Key("final_logit_softcapping", 30.0, {0.0: None})},
        every=6,
        schemes=local_base(THETA),
        more=(LOCAL_BASE, SHARED_KV, COLUMNS, *SWA_DIMS),
        further=read_4,
        written=write_4,
    ),
}
