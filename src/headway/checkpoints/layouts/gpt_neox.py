"""GPT-NeoX, and Pythia, as `transformers` stores them (Black et al. 2022, section 2.1): a part of each head is turned,
and attention and feed-forward stand side by side behind norms of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headway.checkpoints.given import Given
from headway.checkpoints.layouts.base import Layout, Rule, interleaved, layered, same, sublayers
from headway.checkpoints.layouts.gpt2 import ACTS, WB
from headway.checkpoints.rope import Rope, read_rope, write_rope
from headway.models import ModelSpec
from headway.positions import Rotary

NAMES = {"mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h"}
NORMS = {name: name for name in ("input_layernorm", "post_attention_layernorm")}
PARTIAL = "partial_rotary_factor"
ROPE = (
    "max_position_embeddings",
    "original_max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)


def read_partial(given: Given, share: float, head_dim: int, **more: Any) -> Rope:
    """Rotary positions that turn a share of each head, unless `rope_parameters` say another; `more` are keys of a
    config that `read_rope` knows."""
    config: dict[str, Any] = {**given.config, **more}
    parameters = dict(config.get("rope_parameters") or {})
    inner = parameters.pop(PARTIAL, None)
    config["rope_parameters"] = parameters or None
    rope = read_rope(config, max_positions=given.whole("max_position_embeddings"), head_dim=head_dim)
    dims = int(head_dim * float(share if inner is None else inner))
    return replace(rope, rotary=replace(rope.rotary, dims=None if dims == head_dim else dims))


def write_partial(spec: ModelSpec) -> tuple[dict[str, Any], float]:
    """The keys that `read_partial` reads, and the share."""
    rotary = spec.positions if isinstance(spec.positions, Rotary) else Rotary(pairing="halves")
    share = rotary.rotated_dims(spec.head_dim) / spec.head_dim
    keys = write_rope(rotary, spec.trained_context)
    return {**keys, "rope_parameters": {**keys["rope_parameters"], PARTIAL: share}}, share


def _read(given: Given, kind: str) -> dict[str, Any]:
    width, heads = given.whole("hidden_size"), given.whole("num_attention_heads")
    theta = given.get("rotary_emb_base")
    base = {} if theta is None or "rope_theta" in given.config else {"rope_theta": theta}
    inside = given.get("rope_parameters") or {}
    rope = read_partial(
        given,
        given.number("rotary_pct"),
        max(width // heads, 1),
        **({} if "rope_theta" in inside else base),
    )
    act, biased = given.text("hidden_act"), given.flag("attention_bias")
    return {
        "vocab": given.whole("vocab_size"),
        "width": width,
        "layers": given.whole("num_hidden_layers"),
        "heads": heads,
        "kv_heads": heads,
        "hidden": given.whole("intermediate_size"),
        "order": "parallel" if given.flag("use_parallel_residual") else "pre",
        "positions": rope.rotary,
        "trained_context": rope.context,
        "activation": ACTS.get(act, act),
        "qkv_bias": biased,
        "out_bias": biased,
        "dropout": given.number("hidden_dropout"),
        "attention_dropout": given.number("attention_dropout"),
        "norm_eps": given.number("layer_norm_eps"),
        "init_std": given.number("initializer_range"),
        "tied": given.flag("tie_word_embeddings"),
    }


def _write(spec: ModelSpec) -> dict[str, Any]:
    keys, share = write_partial(spec)
    return {
        "vocab_size": spec.vocab,
        "hidden_size": spec.width,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "intermediate_size": spec.hidden,
        "use_parallel_residual": spec.order == "parallel",
        **keys,
        "rotary_pct": share,
        "rotary_emb_base": keys["rope_theta"],
        "hidden_act": spec.activation,
        "attention_bias": spec.qkv_bias,
        "hidden_dropout": spec.dropout,
        "attention_dropout": spec.attention_dropout,
        "layer_norm_eps": spec.norm_eps,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
    }


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    ours, theirs, leaves = "model.layers.#.", "gpt_neox.layers.#.", WB if spec.qkv_bias else ("weight",)
    rules = [
        same("model.embed_tokens.weight", "gpt_neox.embed_in.weight"),
        *sublayers("model.", "gpt_neox.", {"norm": "final_layer_norm"}, WB),
        *sublayers(ours, theirs, {**NORMS, **NAMES}, WB),
        *sublayers(ours, theirs, {"self_attn.o_proj": "attention.dense"}, leaves),
    ]
    for leaf in leaves:
        qkv = [f"{ours}self_attn.{name}_proj.{leaf}" for name in "qkv"]
        fused = f"{theirs}attention.query_key_value.{leaf}"
        rules.append(interleaved(qkv, fused, spec.heads, spec.heads, spec.head_dim))
    return layered(rules if spec.tied else [*rules, same("lm_head.weight", "embed_out.weight")], spec.layers)


GPT_NEOX = Layout(
    family="gpt_neox",
    architectures={"GPTNeoXForCausalLM": "lm"},
    translated=(
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        *("use_parallel_residual", *ROPE, "rotary_pct", "rotary_emb_base", "hidden_act", "attention_bias"),
        *(
            "hidden_dropout",
            "attention_dropout",
            "layer_norm_eps",
            "initializer_range",
            "tie_word_embeddings",
        ),
    ),
    only={"is_decoder": (True, False, None), "is_encoder_decoder": (False, None), "pruned_heads": ({}, None)},
    harmless=("classifier_dropout",),
    defaults={
        "vocab_size": 50432,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "use_parallel_residual": True,
        "max_position_embeddings": 2048,
        "rotary_pct": 0.25,
        "hidden_act": "gelu",
        "attention_bias": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "layer_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    },
    read=_read,
    write=_write,
    rules=_rules,
    prefix="gpt_neox.",
    aliases={"embed_out.weight": "gpt_neox.embed_in.weight"},
    unused=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
