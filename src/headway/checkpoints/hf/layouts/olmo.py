"""OLMo 1, 2 and 3 as `transformers` stores them (Groeneveld et al. 2024; OLMo team 2025); tensors have our own names. 1
has LayerNorm without weights; 2 and 3 have norms on what sub-layers give, and over all queries and keys of a token; 3
has windows in three layers of four."""

from collections.abc import Mapping
from typing import Any

from headway.checkpoints.hf.config_keys import DECODER, ConfigReader, Key, per_head, same_heads
from headway.checkpoints.hf.layer_types import (
    FULL,
    SLIDING,
    every,
    read_kinds,
    read_rope_by_kind,
    read_windows,
    write_by_kind,
)
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.llama import BIAS, FREE, llama_layout
from headway.checkpoints.hf.layouts.tensors import OWN_NAMES

KEYS = {
    **DECODER,
    "kv_heads": Key("num_key_value_heads", same_heads),
    "head_dim": Key("head_dim", per_head, written=False),
    "activation": Key("hidden_act", "silu"),
    "norm_eps": Key("rms_norm_eps", 1e-5),
    "qkv_bias": Key("attention_bias"),
    "out_bias": Key("attention_bias"),
}
CONTEXT = {"max_position_embeddings": 2048}
BASES = {FULL: ("rope_theta", 5e5), SLIDING: ("rope_theta", 5e5)}


def _read(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    kinds = read_kinds(given, fields["layers"], every(4, 3))
    return {
        "patterns": read_windows(given, kinds),
        **read_rope_by_kind(given, kinds, fields["head_dim"], BASES),
    }


OLMO = llama_layout(
    *("olmo", "OlmoForCausalLM", "none", 2048, BIAS),
    head_dim=FREE,
    without=("norm_eps",),
    only={"clip_qkv": (None,)},  # bounds of queries, keys and values
)
OLMO2 = llama_layout("olmo2", "Olmo2ForCausalLM", "none", 2048, KEYS)
OLMO3 = Layout(
    family="olmo3",
    architectures={"Olmo3ForCausalLM": "lm"},
    keys=KEYS,
    more={
        **CONTEXT,
        "sliding_window": 4096,
        **dict.fromkeys(("layer_types", "rope_parameters", "rope_theta", "rope_scaling")),
    },
    read=_read,
    write=lambda spec: write_by_kind(spec, BASES),
    tensors=OWN_NAMES,
)
