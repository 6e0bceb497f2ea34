"""GPT-2 as `transformers` stores it (Radford et al. 2019): matrices [in, out], queries, keys and values in one; and
GPTBigCode, which is GPT-2 with one key and value for all heads (Ben Allal et al. 2023, section 4; Li et al. 2023,
section 4: SantaCoder, StarCoder), with matrices [out, in]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader, FieldMap, gelu_new
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.rules import (
    Modules,
    Rule,
    TensorNames,
    decoder_names,
    module_rules,
    within,
)
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.positions import Learned

KEYS: FieldMap = {
    "vocab": "vocab_size",
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "kv_heads": "n_head",
    "activation": "activation_function",
    "dropout": ("resid_pdrop", "embd_pdrop"),
    "attention_dropout": "attn_pdrop",
    "norm_eps": "layer_norm_epsilon",
    "init_std": "initializer_range",
    "tied": "tie_word_embeddings",
}
NORMS = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
QKV = {"self_attn.qkv_proj": "attn.c_attn"}
MODULES = {"self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
TRANSLATED = ("n_ctx", "n_inner")
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
DEFAULTS = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
}


def _read(given: ConfigReader, kind: str) -> dict[str, Any]:
    """The fields of GPT-2 and GPTBigCode that are not in the table."""
    size = given.whole("n_positions")
    if given.get("n_ctx") not in (None, size):
        raise ConfigError(
            f"config.json: n_ctx is {given.get('n_ctx')}, but the table of positions has n_positions {size} rows; "
            "transformers looks at n_positions alone: drop n_ctx, or make them equal"
        )
    return {
        "hidden": given.whole("n_inner", 4 * given.whole("n_embd")),
        "attention_scale": None if given.flag("scale_attn_weights") else 1.0,
        "positions": Learned(size),
        "trained_context": size,
    }


def _write(spec: ModelSpec) -> dict[str, Any]:
    """The keys that `_read` reads."""
    return {
        "n_positions": spec.context_limit or spec.trained_context,
        "n_inner": spec.hidden,
        "activation_function": gelu_new(spec.activation),
        "scale_attn_weights": spec.attention_scale != 1.0,
    }


def _names(modules: Modules, **more: Any) -> TensorNames:
    """Embeddings, last norm and output layer are named alike."""
    return decoder_names(
        *("transformer.", "transformer.wte", "transformer.ln_f", "transformer.h.#.", modules),
        top={"model.embed_positions": "transformer.wpe"},
        unused=(".attn.bias", ".attn.masked_bias"),
        **more,
    )


def _transposed(spec: ModelSpec) -> Sequence[Rule]:
    ours, theirs = "model.layers.#.", "transformer.h.#."
    return [
        *module_rules(spec, within(ours, theirs, QKV), transpose=True),
        *module_rules(spec, within(ours, theirs, MODULES), ("weight",), transpose=True),
        *module_rules(spec, within(ours, theirs, MODULES), ("bias",)),
    ]


GPT2 = Layout(
    family="gpt2",
    architectures={"GPT2LMHeadModel": "lm"},
    keys=KEYS,
    translated=TRANSLATED,
    only=ONLY,
    harmless=SUMMARY,
    defaults=DEFAULTS,
    read=_read,
    write=_write,
    tensors=_names(NORMS, more=_transposed),
)


def _read_bigcode(given: ConfigReader, kind: str) -> dict[str, Any]:
    fields = _read(given, kind)
    kv_heads = 1 if given.flag("multi_query") else given.whole("n_head")
    if given.get("num_key_value_heads") not in (None, kv_heads):
        raise ConfigError(
            f"config.json: num_key_value_heads is {given.get('num_key_value_heads')}, but multi_query "
            f"{given.flag('multi_query')} makes it {kv_heads}, which is what transformers uses: remove it"
        )
    return {**fields, "kv_heads": kv_heads}


RUNNER = ("inference_runner", "validate_runner_input", "pre_allocate_kv_cache", "max_batch_size",
          "pad_key_length")  # fmt: skip
"""How BigCode's own program ran them."""
GPT_BIGCODE = Layout(
    family="gpt_bigcode",
    architectures={"GPTBigCodeForCausalLM": "lm"},
    keys=KEYS,
    translated=(*TRANSLATED, "num_key_value_heads"),
    # where the softmax is computed: ours is float32 or better in any case
    only={
        **ONLY,
        "attention_softmax_in_fp32": (True, False),
        "scale_attention_softmax_in_fp32": (True, False),
    },
    harmless=(*SUMMARY, *RUNNER),
    defaults={**DEFAULTS, "activation_function": "gelu_pytorch_tanh", "multi_query": True},
    read=_read_bigcode,
    write=lambda spec: {
        **_write(spec),
        "activation_function": spec.activation,
        "multi_query": spec.kv_heads == 1,
    },
    tensors=_names({**NORMS, **QKV, **MODULES}, by_group=True),
)
