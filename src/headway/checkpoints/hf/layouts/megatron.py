"""BLOOM, Falcon and MPT as `transformers` stores them, which have no table of positions.

BLOOM (BigScience 2022, section 3.2) has ALiBi and a norm after the embedding. Falcon (Almazrouei et al. 2023, section
3) has two kinds: 7B is of the first, 40B and 180B are of the second ("new_decoder_architecture"), and 11B is of the
second with one norm. Both families have the names of Megatron-LM. MPT (MosaicML 2023, LLM Foundry) has ALiBi, one
matrix for queries, keys and values, and no biases at all.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from headway.checkpoints.hf.config_keys import (
    FOUR_WIDTHS,
    SIZES,
    ConfigReader,
    Key,
    called,
    check_keys,
    four_widths,
)
from headway.checkpoints.hf.harmless import HARMLESS, words
from headway.checkpoints.hf.layouts.base import Layout, Part
from headway.checkpoints.hf.layouts.rules import Modules, block, decoder_names
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.positions import LinearBias

NORMS = "input_layernorm post_attention_layernorm"
KEYS = {"norm_eps": Key("layer_norm_epsilon", 1e-5), "tied": Key("tie_word_embeddings", True)}
_names = partial(
    decoder_names,
    *("transformer.", "transformer.word_embeddings", "transformer.ln_f", "transformer.h.#."),
    by_group=True,
)
"""Names of BLOOM and Falcon."""


def _block(norms: str = NORMS) -> Modules:
    return block(norms, "self_attention. query_key_value dense", "mlp. dense_h_to_4h dense_4h_to_h")


BLOOM = Layout(
    family="bloom",
    architectures={"BloomForCausalLM": "lm"},
    keys={
        **called(SIZES, layers="n_layer", heads="n_head"),
        **KEYS,
        "hidden": FOUR_WIDTHS,
        "trained_context": Key("seq_length", 2048),
    },
    only={
        "apply_residual_connection_post_layernorm": (False, None),
        # ours would also apply to the embedding; the published models have no dropout
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), (0, None)),
    },
    harmless=(
        *words("slow_but_exact unk_token_id masked_softmax_fusion skip_bias_add skip_bias_add_qkv"),
        *words("attention_softmax_in_fp32 bias_dropout_fusion offset_alibi"),
    ),
    tensors=_names(_block(), top={"model.embed_norm": "transformer.word_embeddings_layernorm"}),
)
NEW = "new_decoder_architecture"


def _read_falcon(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads norms and kv heads of either kind. Raises ConfigError for what transformers cannot run."""
    new, parallel, heads = config.flag(NEW), config.flag("parallel_attn"), fields["heads"]
    norms = config.whole("num_ln_in_parallel_attn", 2 if new else 1)
    if norms > 2 or (norms == 2 and not new) or (new and not parallel):
        raise ConfigError(
            f"config.json: {NEW} {new} with parallel_attn {parallel} and num_ln_in_parallel_attn {norms}: "
            f"transformers fails on these; 2 norms need {NEW} true, which itself needs parallel_attn true"
        )
    order = ("parallel" if norms == 2 else "joint") if parallel else "pre"
    if new:
        return {"order": order, "kv_heads": config.whole("num_kv_heads", heads)}
    if config.flag("multi_query"):  # transformers then ignores num_kv_heads, which is 71 in the 7B
        return {"order": order, "kv_heads": 1}
    if config.whole("num_kv_heads", heads) != heads:
        raise ConfigError(
            f"config.json: num_kv_heads {config.get('num_kv_heads')} of {heads} heads needs {NEW}: true; without it "
            f"num_kv_heads is 1 (multi_query) or {heads}"
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
        **KEYS,
        "hidden": Key("ffn_hidden_size", four_widths),
        "activation": Key("activation", "gelu"),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), Key("bias")),
    },
    more={"max_position_embeddings": 2048},
    only={
        # their dropouts apply elsewhere: to the sum of both sub-layers, and one probability in two places
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), (0.0, None)),
        "apply_residual_connection_post_layernorm": (False, None),
        # transformers rounds slopes and positions to bfloat16, so that the bias is not linear in the distance
        "alibi": (False, None),
    },
    rope="",
    parts=(
        Part(
            {
                **dict.fromkeys((NEW, "num_ln_in_parallel_attn", "num_kv_heads")),
                **dict.fromkeys(("multi_query", "parallel_attn"), True),
            },
            _read_falcon,
            _write_falcon,
        ),
    ),
    tensors=_names(lambda spec: _block("ln_attn ln_mlp" if spec.order == "parallel" else NORMS)),
)
ATTENTION = {
    # transformers supports only these values: it splits Wqkv into three equal parts, adds ALiBi, and ignores these
    # keys. alibi_bias_max, which it ignores, too, is read, since LLM Foundry trained with it
    "attn_type": ("multihead_attention",),
    "alibi": (True,),
    "attn_pdrop": (0,),
    "clip_qkv": (None,),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "attn_uses_sequence_id": (False,),
}

RUN = ("attn_impl", "model_type", "architectures", "label2id", "is_encoder_decoder")
"""Keys of `attn_config` that choose a kernel, or that every config of transformers has."""


def _read_mpt(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    attention = config.get("attn_config") or {}
    if not isinstance(attention, Mapping):
        raise ConfigError(f'config.json: "attn_config" must be an object, got {attention!r}')
    free = dict.fromkeys(("alibi_bias_max", "softmax_scale", *RUN, *HARMLESS))
    check_keys(attention, {**free, **ATTENTION}, place="attn_config.", of=" for model_type mpt")
    inner = ConfigReader(attention, {})
    scaled = inner.get("softmax_scale") is not None
    largest = 8.0 if inner.get("alibi_bias_max") is None else inner.number("alibi_bias_max")
    if not 0 < largest < math.inf:
        raise ConfigError(
            f'config.json: "attn_config.alibi_bias_max" must be a number above 0, got {largest}'
        )
    return {
        "positions": _slopes(fields["heads"], largest),
        "attention_scale": inner.number("softmax_scale") if scaled else None,
    }


def _slopes(heads: int, largest: float) -> LinearBias:
    """Returns the slopes 2^(-m (h + 1) / P) for P heads, a power of two, with m = `largest` (8 in published models).

    For other numbers of heads, P is the next power of two: first every second slope (h = 1, 3, ...), then the others,
    as many as there are heads. (LLM Foundry, `gen_slopes`.)"""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-largest * (h + 1) / power) for h in range(power)]
    if power == heads:
        return LinearBias() if largest == 8 else LinearBias(tuple(slopes))
    return LinearBias(tuple([*slopes[1::2], *slopes[::2]][:heads]))


MPT = Layout(
    family="mpt",
    architectures={"MptForCausalLM": "lm", "MPTForCausalLM": "lm"},
    keys={
        **called(SIZES, width="d_model", layers="n_layers", heads="n_heads"),
        **KEYS,
        "hidden": FOUR_WIDTHS,
        "trained_context": Key("max_seq_len", 2048),
    },
    only={
        "expansion_ratio": (4, None),
        "no_bias": (True, None),
        "logit_scale": (None,),
        **dict.fromkeys(("resid_pdrop", "emb_pdrop"), (0, None)),
    },
    # how LLM Foundry trained and ran them; with ALiBi there is no table of positions
    harmless=(
        *words("learned_pos_emb init_device embedding_fraction norm_type init_config tokenizer_name"),
        "verbose",
    ),
    parts=(
        Part(
            {"attn_config": None},
            _read_mpt,
            lambda spec: {"attn_config": {"softmax_scale": spec.attention_scale}},
        ),
    ),
    tensors=decoder_names(
        *("transformer.", "transformer.wte", "transformer.norm_f", "transformer.blocks.#."),
        block("norm_1 norm_2", "attn. Wqkv out_proj", "ffn. up_proj down_proj"),
    ),
)
