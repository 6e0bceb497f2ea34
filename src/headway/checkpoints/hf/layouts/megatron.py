"""BLOOM and Falcon as `transformers` stores them, with the names of Megatron-LM.

BLOOM (BigScience 2022, section 3.2) has ALiBi and a norm behind the embedding. Falcon (Almazrouei et al. 2023, section
3) is 7B of the first kind, 40B and 180B of the second ("new_decoder_architecture"), and 11B, which is the second with
one norm.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from headway.checkpoints.hf.config_keys import SIZES, ConfigReader, Key, four_widths
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.rules import Modules, TensorNames, decoder_names
from headway.errors import ConfigError
from headway.models import ModelSpec

NORMS = {name: name for name in ("input_layernorm", "post_attention_layernorm")}
TWO_NORMS = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
QKV = {"self_attn.qkv_proj": "self_attention.query_key_value"}
OUTPUT = {"self_attn.o_proj": "self_attention.dense"}
FORWARD = {"mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h"}


def _names(
    modules: Modules | Callable[[ModelSpec], Modules], top: Modules = MappingProxyType({})
) -> TensorNames:
    """BLOOM's and Falcon's."""
    ends = ("transformer.word_embeddings", "transformer.ln_f")
    return decoder_names("transformer.", *ends, "transformer.h.#.", modules, top=top, by_group=True)


BLOOM = Layout(
    family="bloom",
    architectures={"BloomForCausalLM": "lm"},
    keys={
        "vocab": Key("vocab_size"),
        "width": Key("hidden_size"),
        "layers": Key("n_layer"),
        "heads": Key("n_head"),
        "kv_heads": Key("n_head"),
        "trained_context": Key("seq_length", 2048),
        "norm_eps": Key("layer_norm_epsilon", 1e-5),
        "init_std": Key("initializer_range", 0.02),
        "tied": Key("tie_word_embeddings", True),
    },
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
    read=lambda given, kind, fields: {"hidden": four_widths(fields)},
    tensors=_names(
        {**OUTPUT, **FORWARD, **NORMS, **QKV},
        top={"model.embed_norm": "transformer.word_embeddings_layernorm"},
    ),
)

NEW = "new_decoder_architecture"


def _read_falcon(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Norms and kv heads, of the first kind or the second; what transformers builds and cannot run is refused."""
    new, parallel, heads = given.flag(NEW), given.flag("parallel_attn"), fields["heads"]
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


def _write_falcon(spec: ModelSpec) -> dict[str, Any]:
    new = spec.order == "parallel" or 1 < spec.kv_heads < spec.heads
    return {
        NEW: new,
        "parallel_attn": spec.order != "pre" or new,
        "num_ln_in_parallel_attn": 2 if spec.order == "parallel" else 1,
        "multi_query": spec.kv_heads == 1,
        "num_kv_heads": spec.kv_heads if new else spec.heads,
    }


FALCON = Layout(
    family="falcon",
    architectures={"FalconForCausalLM": "lm"},
    keys={
        **SIZES,
        "hidden": Key("ffn_hidden_size", four_widths),
        "activation": Key("activation", "gelu"),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), Key("bias")),
        "norm_eps": Key("layer_norm_epsilon", 1e-5),
        "tied": Key("tie_word_embeddings", True),
    },
    more={
        **dict.fromkeys((NEW, "num_ln_in_parallel_attn", "num_kv_heads")),
        "multi_query": True,
        "parallel_attn": True,
        "max_position_embeddings": 2048,
    },
    rope="",
    only={
        # their dropouts fall elsewhere: on the sum of both sub-layers, and one probability on two things
        "hidden_dropout": (0.0, None),
        "attention_dropout": (0.0, None),
        "apply_residual_connection_post_layernorm": (False, None),
        # transformers rounds slopes and positions to bfloat16, and then it is not linear in the distance
        "alibi": (False, None),
    },
    read=_read_falcon,
    write=_write_falcon,
    tensors=_names(
        lambda spec: {**(TWO_NORMS if spec.order == "parallel" else NORMS), **OUTPUT, **FORWARD, **QKV}
    ),
)
