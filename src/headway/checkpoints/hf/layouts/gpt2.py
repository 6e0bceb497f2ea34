"""GPT-2 as `transformers` stores it (Radford et al. 2019): matrices [in, out], queries, keys and values in one; and
GPTBigCode, which is GPT-2 with one key and value for all heads (Ben Allal et al. 2023, section 4; Li et al. 2023,
section 4: SantaCoder, StarCoder), with matrices [out, in]."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from headway.checkpoints.hf.config_keys import OLD_GELU, ConfigReader, FieldMap, Key, four_widths
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.rules import decoder_names
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.positions import Learned

KEYS: FieldMap = {
    "vocab": Key("vocab_size"),
    "width": Key("n_embd"),
    "layers": Key("n_layer"),
    "heads": Key("n_head"),
    "kv_heads": Key("n_head"),
    "hidden": Key("n_inner", four_widths),
    "activation": Key("activation_function", "gelu_new", OLD_GELU),
    "dropout": Key(("resid_pdrop", "embd_pdrop"), 0.1),
    "attention_dropout": Key("attn_pdrop", 0.1),
    "attention_scale": Key("scale_attn_weights", True, {True: None, False: 1.0}),
    "norm_eps": Key("layer_norm_epsilon", 1e-5),
    "init_std": Key("initializer_range", 0.02),
    "tied": Key("tie_word_embeddings", True),
}
MORE = {"n_positions": 1024, "n_ctx": None}
MODULES = {
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.qkv_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
ONLY = {
    "scale_attn_by_inverse_layer_idx": (False, None),
    "add_cross_attention": (False, None),
    "gradient_checkpointing": (False, None),
    # the order of two operations in training in mixed precision; no other value in exact numbers
    "reorder_and_upcast_attn": (False, True, None),
}
SUMMARY = ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
           "summary_first_dropout")  # fmt: skip
"""Keys of GPT2DoubleHeadsModel, which no language model looks at."""


def _read(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of GPT-2 and GPTBigCode that are not in the table."""
    size = given.whole("n_positions")
    if given.get("n_ctx") not in (None, size):
        raise ConfigError(
            f"config.json: n_ctx is {given.get('n_ctx')}, but the table of positions has n_positions {size} rows; "
            "transformers looks at n_positions alone: drop n_ctx, or make them equal"
        )
    return {"positions": Learned(size), "trained_context": size}


def _write(spec: ModelSpec) -> dict[str, Any]:
    """The keys that `_read` reads."""
    return {"n_positions": spec.context_limit or spec.trained_context}


_names = partial(
    decoder_names,
    *("transformer.", "transformer.wte", "transformer.ln_f", "transformer.h.#.", MODULES),
    top={"model.embed_positions": "transformer.wpe"},
    unused=(".attn.bias", ".attn.masked_bias"),
)
"""Both are named alike; how a layer's matrices lie differs."""
GPT2 = Layout(
    family="gpt2",
    architectures={"GPT2LMHeadModel": "lm"},
    keys=KEYS,
    more=MORE,
    only=ONLY,
    harmless=SUMMARY,
    read=_read,
    write=_write,
    tensors=_names(transposed=True),
)


def _read_bigcode(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    kv_heads = 1 if given.flag("multi_query") else fields["heads"]
    if given.get("num_key_value_heads") not in (None, kv_heads):
        raise ConfigError(
            f"config.json: num_key_value_heads is {given.get('num_key_value_heads')}, but multi_query "
            f"{given.flag('multi_query')} makes it {kv_heads}, which is what transformers uses: remove it"
        )
    return {**_read(given, kind, fields), "kv_heads": kv_heads}


RUNNER = ("inference_runner", "validate_runner_input", "pre_allocate_kv_cache", "max_batch_size",
          "pad_key_length")  # fmt: skip
"""How BigCode's own program ran them."""
GPT_BIGCODE = Layout(
    family="gpt_bigcode",
    architectures={"GPTBigCodeForCausalLM": "lm"},
    keys={**KEYS, "activation": Key("activation_function", "gelu_pytorch_tanh")},
    more={**MORE, "num_key_value_heads": None, "multi_query": True},
    # where the softmax is computed: ours is float32 or better in any case
    only={
        **ONLY,
        "attention_softmax_in_fp32": (True, False),
        "scale_attention_softmax_in_fp32": (True, False),
    },
    harmless=(*SUMMARY, *RUNNER),
    read=_read_bigcode,
    write=lambda spec: {**_write(spec), "multi_query": spec.kv_heads == 1},
    tensors=_names(by_group=True),
)
