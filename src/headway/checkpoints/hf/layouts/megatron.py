"""BLOOM, Falcon and GPT-NeoX as `transformers` stores them, with the names of Megatron-LM.

BLOOM (BigScience 2022, section 3.2) has ALiBi and a norm behind the embedding. Falcon (Almazrouei et al. 2023, section
3) is 7B of the first kind, 40B and 180B of the second ("new_decoder_architecture"), and 11B, which is the second with
one norm. GPT-NeoX, and Pythia (Black et al. 2022, section 2.1), rotate a part of each head; attention and feed-forward
are parallel, each behind its own norm.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from headway.checkpoints.hf.config_keys import DECODER, ConfigReader, FieldMap
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.rules import Modules, TensorNames, decoder_names
from headway.checkpoints.hf.rope import ROPE, read_rope, write_rope
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.positions import LinearBias
from headway.scores import alibi_slopes

NORMS = {name: name for name in ("input_layernorm", "post_attention_layernorm")}
TWO_NORMS = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
QKV = {"self_attn.qkv_proj": "self_attention.query_key_value"}
OUTPUT = {"self_attn.o_proj": "self_attention.dense"}
FORWARD = {"mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h"}
BLOOM_KEYS: FieldMap = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "n_layer",
    "heads": "n_head",
    "kv_heads": "n_head",
    "trained_context": "seq_length",
    "norm_eps": "layer_norm_epsilon",
    "init_std": "initializer_range",
    "tied": "tie_word_embeddings",
}


def _names(
    modules: Modules | Callable[[ModelSpec], Modules], top: Modules = MappingProxyType({})
) -> TensorNames:
    """BLOOM's and Falcon's."""
    ends = ("transformer.word_embeddings", "transformer.ln_f")
    return decoder_names("transformer.", *ends, "transformer.h.#.", modules, top=top, by_group=True)


BLOOM = Layout(
    family="bloom",
    architectures={"BloomForCausalLM": "lm"},
    keys=BLOOM_KEYS,
    only={
        "apply_residual_connection_post_layernorm": (False, None),
        # not dropped behind the embedding, as ours would be; the published models have none
        "hidden_dropout": (0, None),
        "attention_dropout": (0, None),
    },
    harmless=(
        "slow_but_exact",
        "unk_token_id",
        "masked_softmax_fusion",
        "skip_bias_add",
        "skip_bias_add_qkv",
        "attention_softmax_in_fp32",
        "bias_dropout_fusion",
        "offset_alibi",
    ),
    defaults={
        "vocab_size": 250880,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 8,
        "seq_length": 2048,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
    read=lambda given, kind: {"hidden": 4 * given.whole("hidden_size")},
    write=lambda spec: {},
    tensors=_names(
        {**OUTPUT, **FORWARD, **NORMS, **QKV},
        top={"model.embed_norm": "transformer.word_embeddings_layernorm"},
    ),
)

FALCON_KEYS: FieldMap = {
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


def _read_falcon(given: ConfigReader, kind: str) -> dict[str, Any]:
    width, heads = given.whole("hidden_size"), given.whole("num_attention_heads")
    head_dim = max(width // heads, 1)
    size, alibi = given.whole("max_position_embeddings"), given.flag("alibi")
    rope = read_rope(given, head_dim)
    bias = {"positions": _slopes(heads, head_dim, size), "trained_context": size} if alibi else {}
    return {
        "hidden": given.whole("ffn_hidden_size", 4 * width),
        **_blocks(given, heads),
        **rope,
        **bias,
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


def _write_falcon(spec: ModelSpec) -> dict[str, Any]:
    new = spec.order == "parallel" or 1 < spec.kv_heads < spec.heads
    return {
        "ffn_hidden_size": spec.hidden,
        NEW: new,
        "parallel_attn": spec.order != "pre" or new,
        "num_ln_in_parallel_attn": 2 if spec.order == "parallel" else 1,
        "multi_query": spec.kv_heads == 1,
        "num_kv_heads": spec.kv_heads if new else spec.heads,
        "alibi": isinstance(spec.positions, LinearBias),
        **write_rope(spec),
    }


FALCON = Layout(
    family="falcon",
    architectures={"FalconForCausalLM": "lm"},
    keys=FALCON_KEYS,
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
    read=_read_falcon,
    write=_write_falcon,
    tensors=_names(
        lambda spec: {**(TWO_NORMS if spec.order == "parallel" else NORMS), **OUTPUT, **FORWARD, **QKV}
    ),
)

NEOX_KEYS: FieldMap = {
    **DECODER,
    "kv_heads": "num_attention_heads",
    "qkv_bias": "attention_bias",
    "out_bias": "attention_bias",
    "dropout": "hidden_dropout",
    "norm_eps": "layer_norm_eps",
}


def _read_neox(given: ConfigReader, kind: str) -> dict[str, Any]:
    head_dim = max(given.whole("hidden_size") // given.whole("num_attention_heads"), 1)
    return {
        "order": "parallel" if given.flag("use_parallel_residual") else "pre",
        **read_rope(given, head_dim, share=given.number("rotary_pct"), theta=given.get("rotary_emb_base")),
    }


def _write_neox(spec: ModelSpec) -> dict[str, Any]:
    keys = write_rope(spec, share="rotary_pct")
    return {
        **keys,
        "rotary_emb_base": keys["rope_theta"],
        "use_parallel_residual": spec.order == "parallel",
    }


GPT_NEOX = Layout(
    family="gpt_neox",
    architectures={"GPTNeoXForCausalLM": "lm"},
    keys=NEOX_KEYS,
    translated=(*ROPE, "rotary_emb_base"),
    only={"is_decoder": (True, False, None)},
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
    read=_read_neox,
    write=_write_neox,
    tensors=decoder_names(
        *("gpt_neox.", "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "gpt_neox.layers.#."),
        {
            **NORMS,
            **FORWARD,
            "self_attn.o_proj": "attention.dense",
            "self_attn.qkv_proj": "attention.query_key_value",
        },
        head="embed_out",
        by_group=True,
        unused=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    ),
)
