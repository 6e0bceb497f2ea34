"""Lara Mini as `transformers` stores it from 5.24 on (Translated 2026): Qwen3's attention with rotary positions in
windows and without any where there is none, Qwen3.5's gated delta rule between them, and experts, one of which all
tokens have. What the rule is given is one matrix."""

from collections.abc import Mapping
from typing import Any

from headway.attention.delta import DeltaSpec
from headway.checkpoints.hf.config_keys import ConfigReader, Key
from headway.checkpoints.hf.layouts.base import Part
from headway.checkpoints.hf.layouts.experts import NORMALIZED, ExpertKeys, stacked
from headway.checkpoints.hf.layouts.hybrids import (
    DELTA_SIZES,
    INNER,
    LINEAR,
    MIXER,
    by_mixer,
    check_silu,
    delta_rules,
    mixed,
    mixer_keys,
)
from headway.checkpoints.hf.layouts.llama import BIAS, llama_layout
from headway.checkpoints.hf.layouts.parts import in_windows
from headway.checkpoints.hf.layouts.rules import Rule
from headway.checkpoints.hf.layouts.tensors import renamed
from headway.checkpoints.hf.windows import FULL, SLIDING, UNUSED, from_foreign, read_kinds, window_keys
from headway.models import ModelSpec
from headway.patterns import Causal

USUAL = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)


def _read(given: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    check_silu(fields)
    layers, window = fields["layers"], from_foreign("sliding_window", given.get("sliding_window"))
    usual = [USUAL[i % len(USUAL)] for i in range(layers)]
    kinds = read_kinds(given, layers, lambda *_: usual, (FULL, SLIDING, LINEAR))
    sizes: dict[str, Any] = {name: given.whole(key) for name, key in DELTA_SIZES.items()}
    found = mixed([FULL if kind == SLIDING else kind for kind in kinds], DeltaSpec(**sizes))
    found["patterns"] = tuple(window if kind == SLIDING else Causal() for kind in kinds)
    return {**found, **in_windows(given, {**fields, **found})}


def _write(spec: ModelSpec) -> dict[str, Any]:
    delta, kinds = mixer_keys(spec, DeltaSpec, LINEAR)
    sizes = {key: getattr(delta, name) for name, key in DELTA_SIZES.items()} if delta else {}
    windows = window_keys(spec, UNUSED)
    both = zip(kinds, windows["layer_types"], strict=True)
    return {**windows, **sizes, "layer_types": [a if a == LINEAR else b for a, b in both]}


def _rules(spec: ModelSpec) -> list[Rule]:
    delta = next((mixer for mixer in spec.mixers if isinstance(mixer, DeltaSpec)), None)
    rules = delta_rules(spec, "linear_attn", {**INNER, "norm.weight": "out_norm.weight"})
    if delta is not None:
        parts = tuple(f"{MIXER}{part}_proj.weight" for part in ("q", "k", "v", "gate", "beta", "decay"))
        rows = *delta.channels, delta.heads * delta.value_size, delta.heads, delta.decays
        rules.append(Rule(parts, "model.layers.#.linear_attn.in_proj.weight", rows))
    experts = [f"mlp.experts.{name}_proj" for name in ("gate_up", "down")]
    return [
        *by_mixer(spec, {DeltaSpec: rules}),
        *stacked(spec, {"weight": experts[0]}, {"weight": experts[1]}),
    ]


WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size")
LARA_MINI = llama_layout(
    *("lara_mini", "LaraMiniForCausalLM", None, 131072),
    {**BIAS, "tied": Key("tie_word_embeddings", True)},
    experts=ExpertKeys(
        shared=WIDTHS[1],
        dense=WIDTHS[0],
        others=NORMALIZED,
        aux=0.001,
        usual={**dict.fromkeys(WIDTHS, 512), "norm_topk_prob": True},
    ),
    kv_heads=4,
    head_dim=Key("head_dim", 128),
    more={"sliding_window": 512},
    parts=(Part(dict(zip(DELTA_SIZES.values(), (16, 8, 128, 128, 4), strict=True)), _read, _write),),
    tensors=renamed({}, _rules),
)
