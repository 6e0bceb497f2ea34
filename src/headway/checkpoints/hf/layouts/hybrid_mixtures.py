"""Hybrids with experts in place of the feed-forward, as `transformers` stores them.

Qwen3-Next (Qwen team 2025) and Qwen3.5's mixtures (2026) have those of Qwen2-MoE. Qwen3-Next has queries, keys, values
and gates of each key head in one matrix, betas and decays in another; Qwen3.5's files have the experts of a layer in
two tensors, and those that transformers writes in matrices of each.
"""

from collections.abc import Mapping
from typing import Any

from headway.attention.delta import DeltaSpec
from headway.checkpoints.hf.layouts.experts import STEPS, ExpertKeys, expert_layout, renamed, stacked
from headway.checkpoints.hf.layouts.hybrids import (
    INNER,
    MIXER,
    QWEN,
    by_mixer,
    delta_rules,
    gated_rules,
    qwen_rules,
)
from headway.checkpoints.hf.layouts.llama import NONE
from headway.checkpoints.hf.layouts.mixtures import NORMALIZED
from headway.checkpoints.hf.layouts.rules import Rule
from headway.checkpoints.hf.layouts.tensors import OWN_NAMES
from headway.models import ModelSpec
from headway.models.mixers import Softmax

SHARED: Mapping[str, Any] = {"shared": "shared_expert_intermediate_size", "always": {"shared_gate": True}}
WIDTHS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
UNUSED = (*OWN_NAMES.unused, "mtp.")


def _next_rules(spec: ModelSpec) -> list[Rule]:
    place, rules = "model.layers.#.linear_attn.", delta_rules(spec, "linear_attn", INNER)
    delta = next((mixer for mixer in spec.mixers if isinstance(mixer, DeltaSpec)), None)
    if delta is not None:
        fused = {"qkvz": ("q", "k", "v", "gate"), "ba": ("beta", "decay")}
        values = delta.heads * delta.value_size
        rows = {"qkvz": (*delta.channels, values), "ba": (delta.heads, delta.decays)}
        rules += [
            Rule(
                tuple(f"{MIXER}{part}_proj.weight" for part in parts),
                f"{place}in_proj_{name}.weight",
                rows[name],
                delta.key_heads,
            )
            for name, parts in fused.items()
        ]
    return by_mixer(spec, {Softmax: gated_rules(spec), DeltaSpec: rules})


QWEN3_NEXT = expert_layout(
    *("qwen3_next", "Qwen3NextForCausalLM", "none", 32768, NONE),
    ExpertKeys(
        **SHARED, others=NORMALIZED, sparse=STEPS, aux=0.001, usual={**WIDTHS, "norm_topk_prob": True}
    ),
    kv_heads=2,
    tensors=renamed({}, _next_rules, unused=UNUSED),
    **QWEN,
)


def _stacked(spec: ModelSpec) -> list[Rule]:
    names = [f"mlp.experts.{name}_proj" for name in ("gate_up", "down")]
    return [*qwen_rules(spec), *stacked(spec, {"weight": names[0]}, {"weight": names[1]})]


QWEN3_5_MOE = expert_layout(
    *("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", "none", 32768, NONE),
    ExpertKeys(**SHARED, dense="moe_intermediate_size", aux=0.001, usual=WIDTHS),
    kv_heads=2,
    tensors=renamed(
        {},
        qwen_rules,
        unused=UNUSED,
        others={".mlp.experts.gate_up_proj": renamed({}, _stacked, unused=UNUSED)},
    ),
    **{**QWEN, "harmless": (*QWEN["harmless"], "intermediate_size")},
)
