"""MPT as `transformers` stores it (MosaicML 2023, LLM Foundry): ALiBi, one matrix for queries, keys and values, and no
biases at all."""

import math
from collections.abc import Mapping
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader, Key, check_keys, four_widths
from headway.checkpoints.hf.harmless import HARMLESS
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.rules import decoder_names
from headway.errors import ConfigError
from headway.positions import LinearBias

MODULES = {
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "ffn.up_proj",
    "mlp.down_proj": "ffn.down_proj",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "self_attn.qkv_proj": "attn.Wqkv",
}
ATTENTION = {
    # transformers has no others: it makes three equal parts of Wqkv, and adds ALiBi, and ignores these keys;
    # alibi_bias_max, which it ignores too, is read: LLM Foundry trained by it
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


def _read(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    attention = given.get("attn_config") or {}
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
        "hidden": four_widths(fields),
        "positions": _slopes(fields["heads"], largest),
        "attention_scale": inner.number("softmax_scale") if scaled else None,
    }


def _slopes(heads: int, largest: float) -> LinearBias:
    """2^(-m (h + 1) / P) for P heads, a power of two, with m = `largest`: for m = 8 the published slopes. For other
    numbers of heads those of the next power, first every second one (h = 1, 3, ...), then the others, as many as there
    are heads. (LLM Foundry, `gen_slopes`.)"""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-largest * (h + 1) / power) for h in range(power)]
    if power == heads:
        return LinearBias() if largest == 8 else LinearBias(tuple(slopes))
    return LinearBias(tuple([*slopes[1::2], *slopes[::2]][:heads]))


MPT = Layout(
    family="mpt",
    architectures={"MptForCausalLM": "lm", "MPTForCausalLM": "lm"},
    keys={
        "vocab": Key("vocab_size"),
        "width": Key("d_model"),
        "layers": Key("n_layers"),
        "heads": Key("n_heads"),
        "kv_heads": Key("n_heads"),
        "trained_context": Key("max_seq_len", 2048),
        "norm_eps": Key("layer_norm_epsilon", 1e-5),
        "init_std": Key("initializer_range", 0.02),
        "tied": Key("tie_word_embeddings", True),
    },
    more={"attn_config": None},
    only={
        "expansion_ratio": (4, None),
        "no_bias": (True, None),
        "logit_scale": (None,),
        "resid_pdrop": (0, None),
        "emb_pdrop": (0, None),
    },
    # how LLM Foundry trained and ran them; with ALiBi there is no table of positions
    harmless=(
        "learned_pos_emb",
        "init_device",
        "embedding_fraction",
        "norm_type",
        "init_config",
        "tokenizer_name",
        "verbose",
    ),
    read=_read,
    write=lambda spec: {"attn_config": {"softmax_scale": spec.attention_scale}},
    tensors=decoder_names(
        "transformer.", "transformer.wte", "transformer.norm_f", "transformer.blocks.#.", MODULES
    ),
)
