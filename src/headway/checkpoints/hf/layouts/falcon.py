"""Falcon as `transformers` stores it (Almazrouei et al. 2023, section 3): 7B of the first kind, 40B and 180B of the
second ("new_decoder_architecture"), and 11B, which is the second with one norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headway.checkpoints.hf.config_keys import FieldMap
from headway.checkpoints.hf.config_reader import ConfigReader
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.bloom import NAMES
from headway.checkpoints.hf.layouts.rotary import ROPE, write_rotary
from headway.checkpoints.hf.layouts.rules import WB, Rule, decoder_names, ends, qkv, sublayers
from headway.checkpoints.hf.rope import read_rope
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.positions import LinearBias
from headway.scores import alibi_slopes

KEYS: FieldMap = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "activation": "activation",
    "qkv_bias": "bias",
    "out_bias": "bias",
    "mlp_bias": "bias",
    "norm_eps": "layer_norm_epsilon",
    "init_std": "initializer_range",
    "tied": "tie_word_embeddings",
}
NEW = "new_decoder_architecture"
NORMS = {
    "pre": {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"},
    "joint": {"input_layernorm": "input_layernorm"},
    "parallel": {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"},
}


def _read(given: ConfigReader, kind: str) -> dict[str, Any]:
    width, heads = given.whole("hidden_size"), given.whole("num_attention_heads")
    head_dim = max(width // heads, 1)
    size, alibi = given.whole("max_position_embeddings"), given.flag("alibi")
    rope = read_rope(given.config, max_positions=size, head_dim=head_dim)
    return {
        "hidden": given.whole("ffn_hidden_size", 4 * width),
        **_blocks(given, heads),
        "positions": _slopes(heads, head_dim, size) if alibi else rope.rotary,
        "trained_context": size if alibi else rope.context,
    }


def _blocks(given: ConfigReader, heads: int) -> dict[str, Any]:
    """Norms and kv heads, of the first kind or the second; what transformers builds and cannot run is refused."""
    new, parallel = given.flag(NEW), given.flag("parallel_attn")
    norms = given.whole("num_ln_in_parallel_attn", 2 if new else 1)
    if norms > 2 or (norms == 2 and not new) or (new and not parallel):
        raise ConfigError(
            f"config.json: {NEW} {new} with parallel_attn {parallel} and num_ln_in_parallel_attn {norms}: "
            f"transformers fails on it; one norm goes with both kinds, two with {NEW} and parallel_attn true"
        )
    order = ("parallel" if norms == 2 else "joint") if parallel else "pre"
    if new:
        return {"order": order, "kv_heads": given.whole("num_kv_heads", heads)}
    if given.flag("multi_query"):  # transformers ignores num_kv_heads then; 7B's is 71
        return {"order": order, "kv_heads": 1}
    if given.whole("num_kv_heads", heads) != heads:
        raise ConfigError(
            f"config.json: num_kv_heads {given.get('num_kv_heads')} of {heads} heads needs {NEW}: true; without it "
            "there is one (multi_query) or as many as heads"
        )
    return {"order": order, "kv_heads": heads}


def _slopes(heads: int, head_dim: int, size: int) -> LinearBias:
    """Falcon's ALiBi: (q k + slope j) / sqrt(D), with slope and j, and then their product, rounded to bfloat16. (So
    computes the attention "sdpa" of transformers 5.23; its "eager" adds the bias twice.)

    Raises ConfigError where that rounding makes the bias nonlinear, which no slope expresses."""
    slopes = torch.tensor(alibi_slopes(heads)).bfloat16()[:, None]
    at = torch.arange(size)
    if not torch.equal((slopes * at).double(), slopes.double() * at):
        raise ConfigError(
            f"config.json: alibi with {heads} heads and max_position_embeddings {size}: transformers multiplies slopes "
            "and positions in bfloat16, which is no longer linear in the distance, and headway has ALiBi as "
            "published; they are equal for up to 8 heads, whose slopes are powers of 2, and up to 257 positions"
        )
    return LinearBias(tuple(slope / head_dim**0.5 for slope in slopes.flatten().tolist()))


def _write(spec: ModelSpec) -> dict[str, Any]:
    new = spec.order == "parallel" or 1 < spec.kv_heads < spec.heads
    return {
        "ffn_hidden_size": spec.hidden,
        NEW: new,
        "parallel_attn": spec.order != "pre" or new,
        "num_ln_in_parallel_attn": 2 if spec.order == "parallel" else 1,
        "multi_query": spec.kv_heads == 1,
        "num_kv_heads": spec.kv_heads if new else spec.heads,
        "alibi": isinstance(spec.positions, LinearBias),
        **write_rotary(spec),
    }


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    ours, theirs, leaves = "model.layers.#.", "transformer.h.#.", WB if spec.qkv_bias else ("weight",)
    return [
        *ends(spec, "transformer.word_embeddings", "transformer.ln_f"),
        *sublayers(ours, theirs, NORMS.get(spec.order, NORMS["pre"]), WB),
        *sublayers(ours, theirs, NAMES, leaves),
        *qkv(spec, f"{theirs}self_attention.query_key_value", leaves, by_group=True),
    ]


FALCON = Layout(
    family="falcon",
    architectures={"FalconForCausalLM": "lm"},
    keys=KEYS,
    translated=(*ROPE, NEW, "num_ln_in_parallel_attn", "num_kv_heads", "ffn_hidden_size", "alibi"),
    only={
        # their dropouts fall elsewhere: on the sum of both sub-layers, and one probability on two things
        "hidden_dropout": (0.0, None),
        "attention_dropout": (0.0, None),
        "apply_residual_connection_post_layernorm": (False, None),
    },
    defaults={
        "vocab_size": 65024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "multi_query": True,
        "parallel_attn": True,
        "max_position_embeddings": 2048,
        "activation": "gelu",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
    read=_read,
    write=_write,
    tensors=decoder_names(_rules, "transformer.", "transformer.word_embeddings"),
)
