"""Granite 3 as `transformers` stores it (IBM 2024): LLaMA with four multipliers, dense or with experts; all experts of
a layer are two tensors. Granite with windows has attention sinks, and a rotary base, or no positions, for each layer;
HyperCLOVA X (NAVER 2025) also normalizes the outputs of sub-layers (Kim et al. 2025)."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader, Key
from headway.checkpoints.hf.layouts.base import Part
from headway.checkpoints.hf.layouts.experts import LAYER, ExpertKeys, stacked
from headway.checkpoints.hf.layouts.llama import BIAS, FREE, MLP_BIAS, block_names, llama_layout
from headway.checkpoints.hf.layouts.rules import OWN_BLOCK, Rule, same
from headway.checkpoints.hf.layouts.tensors import renamed
from headway.checkpoints.hf.windows import UNUSED, every
from headway.models import ModelSpec
from headway.positions import NoPositions, PerLayer, Rotary


def _read_numbers(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    divisor, factor = config.number("logits_scaling"), config.number("attention_multiplier")
    if not divisor:
        raise config.wrong("logits_scaling", "a number above 0", divisor)
    return {
        "logit_scale": 1 / divisor,
        "attention_scale": None if factor == fields["head_dim"] ** -0.5 else factor,
    }


def _write_numbers(spec: ModelSpec) -> dict[str, Any]:
    factor = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
    divisor = 1 / spec.logit_scale
    whole = max(round(divisor), 1)
    divisor = whole if 1 / whole == spec.logit_scale else divisor
    return {"logits_scaling": float(divisor), "attention_multiplier": factor}


FACTORS = {
    **BIAS,
    **MLP_BIAS,
    "norm_eps": Key("rms_norm_eps", 1e-6),
    "embedding_scale": Key("embedding_multiplier", 1.0),
    "residual_scale": Key("residual_multiplier", 1.0),
}
NUMBERS = Part({"logits_scaling": 1.0, "attention_multiplier": 1.0}, _read_numbers, _write_numbers)
"""The factors of scores and logits."""
_granite = partial(llama_layout, head_dim=FREE, parts=(NUMBERS,))
GRANITE = _granite("granite", "GraniteForCausalLM", "none", 2048, FACTORS)


def _read_bases(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    layers, rotary, bases = fields["layers"], fields["positions"], config.get("layer_rope_theta")
    if bases is None:
        bases = [rotary.theta] * layers
    if (
        not isinstance(bases, list)
        or len(bases) != layers
        or not all(isinstance(n, int | float) for n in bases)
    ):
        raise config.wrong(
            "layer_rope_theta", f"a base, or 0 for no positions, for each of {layers} layers", bases
        )
    positions = [replace(rotary, theta=base) if base else NoPositions() for base in bases]
    return {"positions": PerLayer.of(positions)}


def _write_bases(spec: ModelSpec) -> dict[str, Any]:
    return {
        "layer_rope_theta": [
            scheme.theta if isinstance(scheme, Rotary) else 0 for scheme in spec.layer_positions
        ]
    }


SWA: Mapping[str, Any] = {
    "usual": every(4),
    "unused": UNUSED,
    "more": {"sliding_window": 128},
    "parts": (NUMBERS, Part({"layer_rope_theta": None}, _read_bases, _write_bases)),
}
GRANITE_SWA = _granite(
    *("granite_swa", "GraniteSWAForCausalLM", "layer", 8192),
    {**FACTORS, "norm_eps": Key("rms_norm_eps", 1e-5), "tied": Key("tie_word_embeddings", True)},
    kv_heads=4,
    tensors=renamed({".sink_logit": ".sinks"}),
    **SWA,
)
PERI = {
    **OWN_BLOCK,
    "post_attention_layernorm": "post_norm1",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_norm2",
}
HYPERCLOVAX = llama_layout(
    *("hyperclovax", "HyperCLOVAXForCausalLM", "none", 2048),
    {
        **FACTORS,
        "order": Key("use_post_norm", True, {True: "sandwich", False: "pre"}),
        "logit_scale": Key("logits_scaling", 1.0),
        "attention_scale": Key("attention_multiplier"),
    },
    heads_divide=True,
    tensors=block_names(lambda spec: PERI if spec.order == "sandwich" else OWN_BLOCK),
)


def expert_rules(
    spec: ModelSpec, gate_up: str = "input_linear.weight", down: str = "output_linear.weight"
) -> list[Rule]:
    """Returns the rules of a layer's experts, and of the shared one."""
    moe, shared = "block_sparse_moe.", f"{LAYER}mlp.shared_expert."
    rules = stacked(spec, f"{moe}{gate_up}", f"{moe}{down}")
    if units := max(experts.shared for experts in spec.experts if experts is not None):
        parts = tuple(f"{shared}{part}_proj.weight" for part in ("gate", "up"))
        rules.append(Rule(parts, f"{LAYER}shared_mlp.input_linear.weight", (units, units)))
        rules.append(same(f"{shared}down_proj.weight", f"{LAYER}shared_mlp.output_linear.weight"))
    return rules


_moe = partial(
    _granite,
    where="none",
    context=2048,
    keys={key: value for key, value in FACTORS.items() if key not in MLP_BIAS},
    tensors=renamed({".mlp.gate.": ".block_sparse_moe.router.layer."}, expert_rules),
)
COUNT = ("num_local_experts",)
GRANITE_MOE = _moe(
    *("granitemoe", "GraniteMoeForCausalLM"),
    experts=ExpertKeys(count=COUNT, hidden="intermediate_size", aux=0.001),
)
SHARED = ExpertKeys(count=COUNT, hidden="intermediate_size", shared="shared_intermediate_size", aux=0.001)
GRANITE_SHARED = _moe(*("granitemoeshared", "GraniteMoeSharedForCausalLM"), experts=SHARED)
GRANITE_MOE_SWA = _moe(
    *("granitemoe_swa", "GraniteMoeSWAForCausalLM"),
    experts=replace(SHARED, usual={"shared_intermediate_size": 0}),
    where="layer",
    tensors=renamed(
        {".mlp.gate.": ".block_sparse_moe.router.", ".sink_logit": ".sinks"},
        lambda spec: expert_rules(spec, "experts.gate_up_proj", "experts.down_proj"),
    ),
    **SWA,
)
