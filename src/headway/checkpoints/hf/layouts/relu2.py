"""Families whose feed-forward is ReLU squared, without a gate, as `transformers` stores them.

Arcee AFM (2025) is LLaMA else; Nemotron (Parmar et al. 2024) and Jais 2 (2025) have LayerNorm, Nemotron's times 1 + w;
Persimmon (Adept 2023) has it on queries and keys, too. nanochat (Karpathy 2025) has norms without weights, one behind
the embedding, on queries and keys behind their rotation, and capped logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from headway.checkpoints.hf.config_keys import ConfigReader, Key
from headway.checkpoints.hf.layouts.base import Part
from headway.checkpoints.hf.layouts.llama import BIAS, FREE, MLP_BIAS, llama_layout
from headway.checkpoints.hf.layouts.rules import Change, Rule, block, decoder_names
from headway.checkpoints.hf.rope import PARTIAL
from headway.errors import ConfigError
from headway.models import ModelSpec

RELU2 = {"activation": Key("hidden_act", "relu2")}
LAYER_NORM = {**RELU2, "norm_eps": Key("layer_norm_eps", 1e-5)}
NORMS = "input_layernorm post_attention_layernorm"
ARCEE = llama_layout(
    *("arcee", "ArceeForCausalLM", "none", 4096),
    {**RELU2, **BIAS, **MLP_BIAS, "norm_eps": Key("rms_norm_eps", 1e-5)},
    heads_divide=True,
)
NEMOTRON = llama_layout(
    *("nemotron", "NemotronForCausalLM", "none", 4096),
    {
        **RELU2,
        **BIAS,
        **MLP_BIAS,
        "norm_eps": Key("norm_eps", 1e-5),
        "init_std": Key("initializer_range", 0.0134),
    },
    more={PARTIAL: 0.5},
    rope=PARTIAL,
)
JAIS2 = llama_layout(
    *("jais2", "Jais2ForCausalLM", "none", 8192),
    {**LAYER_NORM, **{field: key._replace(default=True) for field, key in {**BIAS, **MLP_BIAS}.items()}},
    heads_divide=True,
)
PERSIMMON = llama_layout(
    *("persimmon", "PersimmonForCausalLM", "none", 16384),
    {**LAYER_NORM, "qk_norm": Key("qk_layernorm", True, {True: "head", False: "none"})},
    without=("head_dim", "kv_heads"),
    heads_divide=True,
    more={PARTIAL: 0.5},
    only={"hidden_dropout": (0.0, None)},  # of one sub-layer of two, and ours falls on both
    rope=PARTIAL,
    tensors=decoder_names(
        *("", "model.embed_tokens", "model.final_layernorm", "model.layers.#."),
        {
            **block(NORMS, "self_attn. query_key_value dense", "mlp. dense_h_to_4h dense_4h_to_h"),
            "self_attn.q_norm": "self_attn.q_layernorm",
            "self_attn.k_norm": "self_attn.k_layernorm",
        },
        by_group=True,
    ),
)
NAMES = decoder_names(
    *("", "model.embed_tokens", "model.norm", "model.layers.#."),
    block("", "self_attn. q_proj k_proj v_proj o_proj", "mlp. fc1 fc2"),
)


def _turned(spec: ModelSpec) -> Sequence[Rule]:
    """Rotations are by minus the angle there: by the angle, where the halves of each query and key change places."""
    heads = {"q_proj": spec.heads, "k_proj": spec.kv_heads}
    of_rules = ((rule, heads.get(rule.ours[0].split(".")[-2])) for rule in NAMES.rules(spec))
    return [replace(rule, changes=(_swapped(count),)) if count else rule for rule, count in of_rules]


def _swapped(heads: int) -> Change:
    """The halves of each head change places."""

    def turn(x: Tensor) -> Tensor:
        halves: Tensor = x.unflatten(0, (heads, 2, -1))
        return halves.flip(1).flatten(0, 2)

    return Change(turn, turn, rows=True)


def _check_nanochat(given: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    if (factor := fields["positions"].amplitude) != 1:
        raise ConfigError(
            f"config.json: rope_parameters of a nanochat multiply queries and keys by {factor:g} in front of their "
            "norms, which take it away again: give another rope_type"
        )
    return {}


NANOCHAT = llama_layout(
    *("nanochat", "NanoChatForCausalLM", "none", 2048),
    {
        **RELU2,
        **BIAS,
        "norm_eps": Key("rms_norm_eps", 1e-6),
        "logit_cap": Key("final_logit_softcapping", 15.0),
    },
    head_dim=FREE,
    parts=(Part(read=_check_nanochat),),
    tensors=replace(NAMES, rules=_turned),
)
