"""Gemma 3n text models of small odd sizes, as transformers configs; for the widths of per-layer embeddings see
`gemma4_rows`."""

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 61, "vocab_size_per_layer_input": 47, "hidden_size": 20, "intermediate_size": 28,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "hidden_size_per_layer_input": 16,
    "max_position_embeddings": 64, "sliding_window": 5, "laurel_rank": 7, "pad_token_id": None,
}  # fmt: skip
_CASES: dict[str, dict[str, Any]] = {
    "gemma3n": {
        "num_hidden_layers": 5, "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL], "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.0, 0.3], "intermediate_size": [28, 28, 36, 36, 28],
        "final_logit_softcapping": 3.0, "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 1000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "gemma3n, three streams, one vocab": {
        "num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 0, "altup_num_inputs": 3,
        "vocab_size_per_layer_input": 61, "attention_bias": True, "tie_word_embeddings": False, "laurel_rank": 3,
    },
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: ("gemma3n_text", {**SIZES, **changes}) for name, changes in _CASES.items()
}
