"""Keys of `config.json`: those that are fields of a spec, in one table that is read and written, and those that change
nothing in any family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from headway.checkpoints.hf.config_reader import ConfigReader
from headway.errors import ConfigError
from headway.models import ModelSpec

OURS = "headway"
"""The `model_type` of a folder that transformers could only misread, and the key of facts that it has no key for."""

FieldMap = Mapping[str, str | tuple[str, ...]]
"""Field of `ModelSpec` -> its key, or several keys that must agree. Where one key is that of several fields, it is
written from the first."""

SIZES: FieldMap = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "intermediate_size",
    "activation": "hidden_act",
    "init_std": "initializer_range",
}
"""Keys that most families share."""
DECODER: FieldMap = {**SIZES, "attention_dropout": "attention_dropout", "tied": "tie_word_embeddings"}
"""Keys that most newer decoders share."""
KINDS = {f.name: f.type for f in fields(ModelSpec)}
ACTIVATIONS = {"gelu_new": "gelu_pytorch_tanh", "swish": "silu"}
"""Activations that have another name here."""


def names(keys: FieldMap) -> tuple[str, ...]:
    """All keys of a table."""
    return tuple(name for key in keys.values() for name in ((key,) if isinstance(key, str) else key))


def read_fields(given: ConfigReader, keys: FieldMap) -> dict[str, Any]:
    """The fields of a table. Raises ConfigError for a key that is absent, of another type than its field, or
    contradicts its like."""
    return {field: _value(given, KINDS[field], key) for field, key in keys.items()}


def _value(given: ConfigReader, kind: Any, key: str | tuple[str, ...]) -> Any:
    if not isinstance(key, str):
        return one_number(given, *key)
    if kind == "str":
        return activation(given, key)
    read: Mapping[str, Callable[[str], Any]] = {"int": given.whole, "float": given.number, "bool": given.flag}
    return read[kind](key)


def write_fields(spec: ModelSpec, keys: FieldMap) -> dict[str, Any]:
    """The keys of a table; reading them again shows what they cannot express."""
    found: dict[str, Any] = {}
    for field, key in keys.items():
        for name in names({field: key}):
            found.setdefault(name, getattr(spec, field))
    return found


def activation(given: ConfigReader, key: str) -> str:
    """The name here of an activation."""
    name = given.text(key)
    return ACTIVATIONS.get(name, name)


def gelu_new(name: str) -> str:
    """An activation's name in the families that are older than "gelu_pytorch_tanh"."""
    return "gelu_new" if name == "gelu_pytorch_tanh" else name


def one_number(given: ConfigReader, *keys: str) -> float:
    """The number that all these keys have. Raises ConfigError where they differ, since a spec has one for all."""
    values = {key: given.number(key) for key in keys}
    if len(set(values.values())) > 1:
        given_values = ", ".join(f"{key} {value}" for key, value in values.items())
        raise ConfigError(f"config.json: {given_values}: headway has one number for these; make them equal")
    return next(iter(values.values()))


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
