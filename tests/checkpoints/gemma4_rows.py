"""Gemma 4 text models of small odd sizes, as transformers configs.

A norm follows gelu(gate) * p of the per-layer embeddings. If all gates of a token are negative, it scales the rounding
error of gelu's tail up to the size of other values. With 3 columns that is one token in 8: transformers is then 4e-5
from float64, and a bound of 1e-5 would measure that; with 16 columns it is one in 65,536 (published models have 256).
"""

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 61, "vocab_size_per_layer_input": 61, "hidden_size": 20, "intermediate_size": 28,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "global_head_dim": 10,
    "max_position_embeddings": 64, "sliding_window": 5, "pad_token_id": None,
}  # fmt: skip
ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 100.0},
}
KINDS = [SLIDING, SLIDING, FULL, SLIDING, FULL]
_CASES: dict[str, dict[str, Any]] = {
    "e2b": {
        "num_hidden_layers": 5, "layer_types": KINDS, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16, "final_logit_softcapping": 3.0, "rope_parameters": ROPE,
    },
    "e4b": {
        "num_hidden_layers": 6, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 17, "head_dim": 8,
        "layer_types": [SLIDING, FULL] * 3, "global_head_dim": 12, "num_key_value_heads": 1,
    },
    "31b": {
        "num_hidden_layers": 6, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "rope_parameters": ROPE,
        "num_global_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": False,
    },
    "sizes by layer": {
        "num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL], "hidden_size_per_layer_input": 0,
        "per_layer_config": {"1": {"head_dim": 14, "num_key_value_heads": 4}}, "rope_parameters": ROPE,
    },
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    f"gemma4, {name}": ("gemma4_text", {**SIZES, **changes}) for name, changes in _CASES.items()
}
