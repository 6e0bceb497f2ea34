"""Small sizes for decoder configs, and groups of their switches."""

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 32,
    "pad_token_id": None,  # the row of a padding token would get no gradient
}
LLAMA: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
COHERE: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "logit_scale": 0.3}
GPTJ: dict[str, Any] = {
    "vocab_size": 61, "n_positions": 32, "n_embd": 48, "n_layer": 3, "n_head": 4, "rotary_dim": 6,
}  # fmt: skip
NEO: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "num_layers": 3, "num_heads": 6, "max_position_embeddings": 32,
    "attention_types": [[["global", "local"], 1], [["local"], 1]], "window_size": 5,
}  # fmt: skip
OPT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "max_position_embeddings": 32, "pad_token_id": None,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.2], "long_factor": [1.5, 3.0],
    "original_max_position_embeddings": 6, "partial_rotary_factor": 0.5,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "original_max_position_embeddings": 8}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
MINISTRAL = {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
FACTORS = {"embedding_multiplier": 12.0, "logits_scaling": 3.0, "residual_multiplier": 0.22}
XGLM: dict[str, Any] = {
    "vocab_size": 61, "d_model": 48, "num_layers": 3, "attention_heads": 6, "ffn_dim": 80,
    "max_position_embeddings": 32, "pad_token_id": None,
}  # fmt: skip
DECODES: dict[str, Any] = {**SIZES, "is_decoder": True}
PAD = 2  # an id that the inputs do not contain: RoBERTa's positions count only other ids
UNPADDED: dict[str, Any] = {**DECODES, "pad_token_id": PAD, "max_position_embeddings": 32 + PAD + 1}
LFM2 = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}
BIASED = {"attention_bias": True, "mlp_bias": True}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_state": 6, "mamba_d_conv": 3, "mamba_n_groups": 2,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 24, "state_size": 6,
    "n_groups": 2,
}  # fmt: skip
GRANITE: dict[str, Any] = {
    **LLAMA, **MAMBA, **FACTORS, "attention_multiplier": 0.1, "shared_intermediate_size": 40,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
FALCON_H1: dict[str, Any] = {
    **LLAMA,
    **MAMBA,
    "num_hidden_layers": 2,
    "mamba_d_ssm": 40,
    "mamba_d_head": "auto",
}
FALCON_H1_FACTORS: dict[str, Any] = {
    "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "mlp_multipliers": [0.7, 1.3], "key_multiplier": 0.6,
    "attention_out_multiplier": 0.8, "ssm_out_multiplier": 1.2, "ssm_multipliers": [0.5, 1.5, 0.75, 1.25, 0.9],
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 10, "max_position_embeddings": 32, "pad_token_id": None, "mamba_num_heads": 4, "mamba_head_dim": 10,
    "ssm_state_size": 6, "n_groups": 2, "conv_kernel": 3,
}  # fmt: skip
QWEN3_5 = {
    **LLAMA, "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}  # fmt: skip
