"""Mixtures of experts in GGUF: their keys, and the names of their tensors."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from headway.checkpoints.hf.config_keys import ConfigReader, Inexpressible
from headway.checkpoints.hf.layouts.rules import WB, Rule, TensorNames, same
from headway.models import ModelSpec
from headway.nn import Experts

COUNT, USED, WIDTH = "expert_count", "expert_used_count", "expert_feed_forward_length"
SHARED, LEAD = "expert_shared_feed_forward_length", "leading_dense_block_count"
MLP = "model.layers.#.mlp."


class ExpertKeys(NamedTuple):
    """The experts of an architecture whose models may have some.

    Attributes:
        always: fields of `Experts` that have no key.
        shared: whether there is a key for the width of an expert that all tokens have, which is then behind a gate
            where `always` says so.
        lead: whether there is a key for how many of the first layers have none.
    """

    always: Mapping[str, Any] = MappingProxyType({})
    shared: bool = False
    lead: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """All of them."""
        return (COUNT, USED, WIDTH, *([SHARED] if self.shared else ()), *([LEAD] if self.lead else ()))

    def read(self, keys: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The experts of all layers, and the width of the model's dense ones, or of an expert where there are none;
        nothing where there are no experts."""
        if not keys.get(COUNT):
            return {}
        width = keys.whole(WIDTH, fields["hidden"])
        first = keys.whole(LEAD, 0, least=0) if self.lead else 0
        shared = keys.whole(SHARED, 0, least=0) if self.shared else 0
        gate = {"shared_gate": False} if not shared else {}
        given = {**self.always, "count": keys.whole(COUNT), "top": keys.whole(USED), "hidden": width, **gate}
        experts = Experts(**given, shared=shared)
        each = [experts if i >= first else None for i in range(fields["layers"])]
        return {"experts": each, "hidden": fields["hidden"] if first else width}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """The keys. Raises Inexpressible for layers that differ, but the first."""
        first = next((i for i, experts in enumerate(spec.experts) if experts), len(spec.experts))
        kinds = {*spec.experts[first:]}
        if len(kinds) > 1 or (kinds and first and not self.lead):
            raise Inexpressible("experts")
        if not kinds:
            return {}
        experts = spec.experts[first]
        assert experts is not None
        keys = {COUNT: experts.count, USED: experts.top, WIDTH: experts.hidden}
        return {
            **keys,
            **({SHARED: experts.shared or None} if self.shared else {}),
            **({LEAD: first} if self.lead else {}),
        }


def with_experts(names: TensorNames) -> TensorNames:
    """The same names, and those of all experts of a layer, which are one tensor for each of the three matrices, of the
    bias that chooses, and of sink logits."""

    def rules(spec: ModelSpec) -> list[Rule]:
        experts = next((experts for experts in spec.experts if experts is not None), None)
        count = 0 if experts is None else experts.count
        chosen = same(f"{MLP}gate.e_score_correction_bias", "blk.#.exp_probs_b.bias")
        return [
            *names.rules(spec),
            *(
                Rule(
                    tuple(f"{MLP}experts.{e}.{part}_proj.{leaf}" for e in range(count)),
                    f"blk.#.ffn_{part}_exps.{leaf}",
                    stacked=count,
                )
                for part in ("gate", "up", "down")
                for leaf in WB[: 1 + spec.mlp_bias]
                if count
            ),
            *([chosen] if experts is not None and experts.choice_bias else []),
            *([same("model.layers.#.self_attn.sink_logit", "blk.#.attn_sinks.weight")] * spec.sink_logit),
        ]

    return replace(names, rules=rules)
