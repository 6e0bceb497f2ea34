"""Facts that llama.cpp has no keys for and its files fold into the weights: the multipliers of Falcon-H1, and that
token ids above a bound share a row of Gemma 3n's per-layer embeddings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.attention.delta import SSDSpec
from headway.checkpoints.hf.config_keys import Inexpressible
from headway.checkpoints.hf.layouts.falcon_h1 import FALCON_H1, KEY, OUT, SSM_OUT
from headway.models import ModelSpec
from headway.models.mixers import Softmax
from headway.storage.lazy import Form, lazy, with_values


def folded(spec: ModelSpec) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Returns the spec without these facts, and the weights that contain them instead: our name -> factors [O, 1] or
    [1, 1] of its rows, unless all are 1. Raises Inexpressible for a tied matrix that would need two factors."""
    spec = replace(spec, per_layer_vocab=0)
    if spec.family != FALCON_H1.family:
        return spec, {}
    keys = FALCON_H1.config(spec)
    if spec.tied and spec.logit_scale != spec.embedding_scale:
        raise Inexpressible("logit_scale")
    mixer = spec.mixers[0]
    assert isinstance(mixer, Softmax)
    assert isinstance(mixer.beside, SSDSpec)
    ssd = mixer.beside
    of_gate, *of_mixed, of_step = ssd.factors
    modules = {
        "mlp.gate_proj": [spec.mlp_gate_scale],
        "mlp.down_proj": [spec.mlp_scale],
        "self_attn.k_proj": [keys[KEY]],  # scales all attention scores
        "self_attn.o_proj": [keys[OUT]],
        "self_attn.beside.o_proj": [keys[SSM_OUT]],
        "self_attn.beside.gate_proj": [of_gate],
        "self_attn.beside.mixed_proj": [
            factor for factor, rows in zip(of_mixed, ssd.channels[::-1], strict=True) for _ in range(rows)
        ],
        "self_attn.beside.step_proj": [of_step],
    }
    layers = range(spec.layers)
    factors = {f"model.layers.{i}.{module}": each for module, each in modules.items() for i in layers}
    factors |= {"model.embed_tokens": [spec.embedding_scale], "lm_head": [spec.logit_scale]}
    plain = (Softmax(beside=replace(ssd, factors=SSDSpec.factors)),) * spec.layers
    ones: Mapping[str, Any] = dict.fromkeys(
        ("embedding_scale", "logit_scale", "mlp_scale", "mlp_gate_scale"), 1.0
    )
    return replace(spec, attention_scale=None, mixers=plain, **ones), {
        f"{name}.weight": torch.tensor(each)[:, None] for name, each in factors.items() if {*each} != {1.0}
    }


def with_all_rows(state: Mapping[str, Tensor], spec: ModelSpec) -> Mapping[str, Tensor]:
    """Returns the weights with per-layer embeddings of every id: ids from `per_layer_vocab` on get the row of id 0."""
    name, missing = "model.per_layer.embed_tokens.weight", spec.vocab - spec.per_layer_vocab
    if not spec.per_layer_vocab:
        return state
    form = lazy(state).forms[name]

    def make(name: str) -> Tensor:
        rows = state[name]
        return torch.cat((rows, rows[:1].expand(missing, -1)))

    return with_values(state, {name: Form((spec.vocab, *form.shape[1:]), form.dtype)}, make)


def times(factors: Mapping[str, Tensor], name: str, value: Tensor) -> Tensor:
    """Returns a weight multiplied by its factors, if it has any, in its own dtype."""
    return (value.float() * factors[name]).to(value.dtype) if name in factors else value
