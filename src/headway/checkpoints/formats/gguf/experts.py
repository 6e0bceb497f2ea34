"""Mixtures of experts in GGUF: their keys, and the names of their tensors."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from headway.checkpoints.hf.layouts.experts import EVERY, ExpertKeys, behind_first, expert_names
from headway.checkpoints.hf.layouts.rules import WB, Rule, TensorNames, same
from headway.models import ModelSpec

MLP = "model.layers.#.mlp."


def expert_keys(
    always: Mapping[str, Any] = MappingProxyType({}), *, shared: bool = False, lead: bool = False
) -> ExpertKeys:
    """Returns the keys of the experts of an architecture whose models may have some.

    `always` are fields of `Experts` that have no key. `shared` adds a key for the width of the shared expert (which is
    gated if `always` says so), `lead` one for how many of the first layers have no experts."""
    return ExpertKeys(
        count=("expert_count",),
        top="expert_used_count",
        hidden="expert_feed_forward_length",
        dense="feed_forward_length",
        shared="expert_shared_feed_forward_length" if shared else "",
        always=always,
        sparse=behind_first(0, "leading_dense_block_count") if lead else EVERY,
        optional=True,
    )


def with_experts(names: TensorNames) -> TensorNames:
    """Returns `names` with the tensors of a layer's experts (one for each of the three matrices), of the bias that is
    added to scores when experts are chosen, and of attention sinks."""

    def rules(spec: ModelSpec) -> list[Rule]:
        experts = next((experts for experts in spec.experts if experts is not None), None)
        count = 0 if experts is None else experts.count
        chosen = same(f"{MLP}gate.e_score_correction_bias", "blk.#.exp_probs_b.bias")
        return [
            *names.rules(spec),
            *(
                Rule(expert_names(count, part, leaf=leaf), f"blk.#.ffn_{part}_exps.{leaf}", stacked=count)
                for part in ("gate", "up", "down")
                for leaf in WB[: 1 + spec.mlp_bias]
                if count
            ),
            *([chosen] if experts is not None and experts.choice_bias else []),
            *([same("model.layers.#.self_attn.sink_logit", "blk.#.attn_sinks.weight")] * spec.sink_logit),
        ]

    return replace(names, rules=rules)
