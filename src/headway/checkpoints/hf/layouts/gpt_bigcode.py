"""GPTBigCode as `transformers` stores it: GPT-2 with one key and value for all heads (Ben Allal et al. 2023,
section 4; Li et al. 2023, section 4: SantaCoder, StarCoder)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.checkpoints.hf.config_reader import ConfigReader
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.gpt2 import (
    DEFAULTS,
    KEYS,
    NAMES,
    ONLY,
    SUMMARY,
    TRANSLATED,
    read_gpt2,
    top_rules,
    write_gpt2,
)
from headway.checkpoints.hf.layouts.rules import WB, Rule, decoder_names, qkv, sublayers
from headway.errors import ConfigError
from headway.models import ModelSpec

RUNNER = ("inference_runner", "validate_runner_input", "pre_allocate_kv_cache", "max_batch_size",
          "pad_key_length")  # fmt: skip
"""How BigCode's own program ran them."""


def _read(given: ConfigReader, kind: str) -> dict[str, Any]:
    fields = read_gpt2(given, kind)
    kv_heads = 1 if given.flag("multi_query") else given.whole("n_head")
    if given.get("num_key_value_heads") not in (None, kv_heads):
        raise ConfigError(
            f"config.json: num_key_value_heads is {given.get('num_key_value_heads')}, but multi_query "
            f"{given.flag('multi_query')} makes it {kv_heads}, which is what transformers uses: remove it"
        )
    return {**fields, "kv_heads": kv_heads}


def _write(spec: ModelSpec) -> dict[str, Any]:
    return {**write_gpt2(spec), "activation_function": spec.activation, "multi_query": spec.kv_heads == 1}


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    theirs = "transformer.h.#."
    return [
        *top_rules(spec),
        *qkv(spec, f"{theirs}attn.c_attn", by_group=spec.kv_heads > 1),
        *sublayers("model.layers.#.", theirs, NAMES, WB),
    ]


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
    read=_read,
    write=_write,
    tensors=decoder_names(
        _rules, "transformer.", "transformer.wte", unused=(".attn.bias", ".attn.masked_bias")
    ),
)
