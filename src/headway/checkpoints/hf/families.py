"""The decoder families of the Hugging Face folder, as data: which keys `config.json` has and what they mean.

A key is translated (`TRANSLATED`, or the family's own switches), known to be harmless (`HARMLESS`: it does
not change what the model computes), or bound to one value (`ONLY`); every other key is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Switch = bool | Literal["attention_bias", "mlp_bias"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`. A switch is a fixed answer, or the name of the key that decides.

    windows   how transformers places them: "none"; "all" layers alike (`sliding_window`); by "layer"
    (`layer_types`);
              "late" (as "layer", or by `use_sliding_window` and `max_window_layers`)
    head_dim_key, heads_divide   whether it knows "head_dim"; whether it insists on width % heads == 0
    defaults  what transformers takes for a key that is absent (its own defaults, not ours)
    """

    architecture: str
    qkv_bias: Switch = False
    out_bias: Switch = False
    mlp_bias: Switch = False
    qk_norm: bool = False
    windows: Literal["none", "all", "layer", "late"] = "none"
    head_dim_key: bool = True
    heads_divide: bool = False
    own_keys: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def translated(self) -> tuple[str, ...]:
        """Every key of `config.json` that has a meaning for this family."""
        switches = {s for s in (self.qkv_bias, self.out_bias, self.mlp_bias) if isinstance(s, str)}
        return (*TRANSLATED, *sorted(switches), *self.own_keys)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            architecture="LlamaForCausalLM",
            qkv_bias="attention_bias",
            out_bias="attention_bias",
            mlp_bias="mlp_bias",
            heads_divide=True,
            defaults={"max_position_embeddings": 2048},
        ),
        "mistral": Family(
            architecture="MistralForCausalLM",
            windows="all",
            own_keys=("sliding_window",),
            defaults={"sliding_window": 4096, "max_position_embeddings": 131072, "num_key_value_heads": 8},
        ),
        "qwen2": Family(
            architecture="Qwen2ForCausalLM",
            qkv_bias=True,
            windows="late",
            head_dim_key=False,
            own_keys=("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
            defaults={"sliding_window": 4096, "max_position_embeddings": 32768, "num_key_value_heads": 32},
        ),
        "qwen3": Family(
            architecture="Qwen3ForCausalLM",
            qkv_bias="attention_bias",
            out_bias="attention_bias",
            qk_norm=True,
            windows="late",
            own_keys=("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
            defaults={
                "sliding_window": 4096,
                "max_position_embeddings": 32768,
                "num_key_value_heads": 32,
                "head_dim": 128,
            },
        ),
        # Mistral with `layer_types`: what says alternating windows for a LLaMA without biases.
        "ministral": Family(
            architecture="MinistralForCausalLM",
            windows="layer",
            own_keys=("sliding_window", "layer_types"),
            defaults={"sliding_window": 4096, "max_position_embeddings": 131072, "num_key_value_heads": 8},
        ),
    }
)

OURS = "headway"
"""The `model_type` of a folder that transformers could only misread, so that it refuses it instead."""

TRANSLATED = (
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_dropout",
    "initializer_range",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    OURS,
)

ONLY: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        # keys of other families, or of generic code, with the values at which they change nothing
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "sliding_window": (None,),
        "use_sliding_window": (False, None),
        "max_window_layers": (None,),
        "partial_rotary_factor": (1, 1.0, None),
        "is_encoder_decoder": (False, None),
        "add_cross_attention": (False, None),
        "cross_attention_hidden_size": (None,),
        "tie_encoder_decoder": (False, None),
        "is_decoder": (False, True, None),
        "pruned_heads": ({}, None),
        "use_mrope": (False, None),
        "rope_interleaved": (False, None),
        "is_llama_config": (True, None),
        "auto_map": ({}, None),
        "quantization_config": (None,),
        "per_layer_config": ({}, None),
    }
)

HARMLESS = (
    # how the folder came about, how it is run
    "transformers_version",
    "_name_or_path",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "attn_implementation",
    "dtype",
    "torch_dtype",
    "use_cache",
    "pretraining_tp",
    "torchscript",
    "use_bfloat16",
    "tf_legacy_loss",
    "return_dict",
    "return_dict_in_generate",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "chunk_size_feed_forward",
    "max_sequence_length",
    "transformers.js_config",
    "unsloth_version",
    "unsloth_fixed",
    # token ids: tokenizer and generation config own them
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "begin_suppress_tokens",
    "suppress_tokens",
    "bad_words_ids",
    "exponential_decay_length_penalty",
    "tokenizer_class",
    "prefix",
    # generation settings that old versions kept here
    "max_length",
    "min_length",
    "do_sample",
    "early_stopping",
    "num_beams",
    "num_beam_groups",
    "diversity_penalty",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "length_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "num_return_sequences",
    "remove_invalid_values",
    # heads of other tasks
    "id2label",
    "label2id",
    "problem_type",
    "task_specific_params",
    "finetuning_task",
    "num_labels",
)
