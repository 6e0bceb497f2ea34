"""The Gemmas in GGUF. Gemma 3n has fixed numbers in llama.cpp (src/models/gemma3n.cpp), which no key changes: four
streams, ranks of 64, 256 columns by layer, gates that the first ten layers cut, keys of their own in twenty."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal

from headway.checkpoints.formats.gguf.layout import MARKS, SIZES, Fields, Schemes, gguf_layout
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
    """Layers with windows have a rotary base of their own, by default `usual` or that of the others, and no scaling."""
    return lambda rotary, keys: (
        replace(rotary, theta=keys.number(LOCAL_BASE, usual or rotary.theta), scaling=None),
        rotary,
    )


def write_local_base(spec: ModelSpec) -> dict[str, Any]:
    """The base of layers with windows, if there are any."""
    layers = zip(spec.layer_positions, spec.patterns, strict=True)
    bases = (scheme.theta for scheme, pattern in layers if pattern != Causal() and isinstance(scheme, Rotary))
    return {LOCAL_BASE: next(bases, None)}


def scale_of_27b(layers: int) -> Fields:
    """Scores are scaled by D^-0.5 (the default), but in models of so many layers by (width / heads)^-0.5."""
    return lambda keys, fields: {
        "attention_scale": (fields["width"] // fields["heads"]) ** -0.5
        if fields["layers"] == layers
        else None
    }


POST = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
SANDWICH = {**POST, "pre_feedforward_layernorm": "ffn_norm"}

OWN_KEYS, CUT_LAYERS, CUT = 20, 10, 0.95
"""Of Gemma 3n: the layers with keys of their own, those that cut gates, and the share that they cut."""
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
"""Tensors of layers that attend to keys of others, which llama.cpp asks for and does not use."""
STREAMS = [
    *(
        Rule(tuple(f"model.streams.{way}.{i}.weight" for i in range(3)), f"{name}.weight", stacked=3)
        for way, name in (("into", "altup_proj"), ("out", "altup_unembd_proj"))
    ),
    *(Rule((f"{LAYER}altup.{a}",), f"blk.#.{b}.weight") for a, b in COEFFICIENTS.items()),
]


def _cuts(layers: int) -> tuple[float, ...]:
    """The share of gates that each layer cuts."""
    return tuple(CUT if i < CUT_LAYERS else 0.0 for i in range(layers))


def _deviations(layers: int) -> list[float]:
    """How many standard deviations above the mean that is."""
    deviations: list[float] = Normal(0.0, 1.0).icdf(torch.tensor(_cuts(layers))).tolist()
    return deviations


def _kinds(patterns: Sequence[Pattern]) -> list[str]:
    return [FULL if pattern == Causal() else SLIDING for pattern in patterns]


def _shares_well(kinds: Sequence[str]) -> bool:
    """Whether layers that share keys have those of the last two with their own: a window, and none."""
    return len(kinds) <= OWN_KEYS or [*kinds[OWN_KEYS - 2 : OWN_KEYS]] == [SLIDING, FULL]


def read_3n(keys: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from the number of layers, and from which of them have windows; keys of it must agree."""
    layers, kinds = fields["layers"], _kinds(fields["patterns"])
    shared, deviations = max(layers - OWN_KEYS, 0), _deviations(layers)
    cuts = keys.get(CUTS) or deviations
    if keys.whole(SHARED_KV, shared, least=0) != shared:
        raise keys.wrong(SHARED_KV, f"{shared} of {layers} layers", keys.get(SHARED_KV))
    if len(cuts) != layers or not torch.allclose(torch.tensor(cuts), torch.tensor(deviations)):
        raise keys.wrong(CUTS, f"{deviations}, with which llama.cpp cuts gates", cuts)
    if not _shares_well(kinds):
        raise keys.wrong(MARKS, f"a window in layer {OWN_KEYS - 2} and none in the next", keys.get(MARKS))
    mixers = softmax_by_layer(keys, kinds, [{}] * layers, shared)
    return {"mixers": mixers, "mlp_sparsity": _cuts(layers), "laurel": 64, "per_layer_embedding": 256}


def unused_keys(spec: ModelSpec) -> dict[str, Tensor]:
    """Zeros in place of tensors that no layer of a Gemma 3n uses: name -> value."""
    if spec.altup is None:
        return {}
    rows = spec.kv_heads * spec.head_dim
    shapes = dict(zip(UNUSED, (*[(rows, spec.width)] * 2, (spec.head_dim,)), strict=True))
    layers = [i for i, source in enumerate(spec.key_layers) if source != i]
    return {f"blk.{i}.{name}": torch.zeros(shape) for i in layers for name, shape in shapes.items()}


def write_3n(spec: ModelSpec) -> dict[str, Any]:
    """Keys of what llama.cpp has fixed, too; reading them again shows where a spec is another. Raises Inexpressible for
    patterns whose shared keys are not the last."""
    if not _shares_well(_kinds(spec.patterns)):
        raise Inexpressible("patterns")
    return {
        MARKS: [pattern != Causal() for pattern in spec.patterns],
        SIZES["hidden"]: [spec.hidden] * spec.layers,
        SHARED_KV: max(spec.layers - OWN_KEYS, 0),
        CUTS: _deviations(spec.layers),
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
}
