"""Configs of mixture-of-experts models, each with the switches of its family."""

from typing import Any

from tests.checkpoints.decoder_sizes import LFM2, LLAMA, QWEN3_5, SIZES

MOE: dict[str, Any] = {**LLAMA, "num_experts_per_tok": 2}
QWEN: dict[str, Any] = {**MOE, "num_experts": 4, "moe_intermediate_size": 24}
SHARED: dict[str, Any] = {**MOE, "n_routed_experts": 4, "moe_intermediate_size": 24, "n_shared_experts": 2}
GRANITE: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 12.0,
    "logits_scaling": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
}  # fmt: skip
ERNIE: dict[str, Any] = {
    **LLAMA, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 8,
}  # fmt: skip
NEXT: dict[str, Any] = {
    **QWEN3_5, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
LARA = {key: value for key, value in NEXT.items() if key != "intermediate_size"}
LFM: dict[str, Any] = {
    **LFM2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1,
    "layer_types": ["conv", "full_attention", "conv"],
}  # fmt: skip
FOUR: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": 5}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**MOE, "num_local_experts": 4, "sliding_window": 5}),
    "mixtral, three of three, tied": (
        "mixtral",
        {**MOE, "num_local_experts": 3, "num_experts_per_tok": 3, "head_dim": 10, "tie_word_embeddings": True},
    ),
    "qwen2-moe": ("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 40}),
    "qwen2-moe, every second layer, no biases": (
        "qwen2_moe",
        {**QWEN, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, "num_hidden_layers": 4,
         "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen3-moe": ("qwen3_moe", {**QWEN, "head_dim": 10, "norm_topk_prob": True}),
    "qwen3-moe, dense first, biases": (
        "qwen3_moe",
        {**QWEN, "head_dim": 8, "mlp_only_layers": [0], "attention_bias": True},
    ),
    "olmoe": ("olmoe", {**MOE, "num_experts": 4}),
    "olmoe, weights that add up to one": ("olmoe", {**MOE, "num_experts": 4, "norm_topk_prob": True}),
    "flex-olmo": ("flex_olmo", {**MOE, "num_experts": 4}),
    "minimax-m2": (
        "minimax_m2",
        {**MOE, "num_local_experts": 4, "head_dim": 12,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "granite-moe": ("granitemoe", GRANITE),
    "granite-moe, one that all have": ("granitemoeshared", {**GRANITE, "shared_intermediate_size": 40}),
    "granite-moe, none that all have, biases, tied": (
        "granitemoeshared",
        {**GRANITE, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "ernie 4.5 moe": ("ernie4_5_moe", ERNIE),
    "ernie 4.5 moe, every second layer, untied": (
        "ernie4_5_moe",
        {**ERNIE, "num_hidden_layers": 5, "moe_layer_interval": 2, "moe_layer_end_index": 3,
         "moe_num_shared_experts": 0, "tie_word_embeddings": False},
    ),
    "dots": ("dots1", {**SHARED, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}),
    "dots, groups, windows, biases": (
        "dots1",
        {**SHARED, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "max_window_layers": 1, "sliding_window": 5,
         "attention_bias": True, "n_shared_experts": 1},
    ),
    "glm-4.5": ("glm4_moe", {**SHARED, "head_dim": 12, "use_qk_norm": True, "routed_scaling_factor": 2.5}),
    "glm-4.5, no norms, biases": ("glm4_moe", {**SHARED, "attention_bias": True, "first_k_dense_replace": 2}),
    "k-exaone": ("exaone_moe", {**QWEN, **FOUR, "num_shared_experts": 1}),
    "k-exaone, kinds by name": (
        "exaone_moe",
        {**QWEN, "num_shared_experts": 1, "sliding_window": 5,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"],
         "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "solar-open": ("solar_open", {**SHARED, "head_dim": 10, "attention_bias": True}),
    "mellum": (
        "mellum",
        {**QWEN, "head_dim": 8, "sliding_window": 5, "mlp_layer_types": ["dense", "sparse", "sparse"],
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
         "rope_parameters": {
             "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
         }},
    ),
    "hy3": ("hy_v3", {**QWEN, "head_dim": 10, "num_shared_experts": 1, "attention_bias": True}),
    "gpt-oss": (
        "gpt_oss",
        {**MOE, **FOUR, "num_local_experts": 4, "head_dim": 10,
         "rope_parameters": {**YARN, "rope_theta": 500.0, "factor": 4.0}},
    ),
    "gpt-oss, no windows, tied": (
        "gpt_oss",
        {**MOE, "num_local_experts": 4, "head_dim": 8, "layer_types": ["full_attention"] * 3, "attention_bias": False,
         "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "granite-moe with windows": (
        "granitemoe_swa",
        {**GRANITE, "shared_intermediate_size": 40, "sliding_window": 5, "layer_rope_theta": [500.0, 0, 70]},
    ),
    "granite-moe with windows, none that all have, one base": (
        "granitemoe_swa",
        {**GRANITE, **FOUR, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "afmoe": (
        "afmoe",
        {**QWEN, **FOUR, "head_dim": 10, "num_shared_experts": 1, "mup_enabled": True, "route_scale": 2.5},
    ),
    "afmoe, dense first, layers by name": (
        "afmoe",
        {**QWEN, "head_dim": 8, "num_dense_layers": 2, "sliding_window": 5, "tie_word_embeddings": True,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "flint": (
        "flint",
        {**QWEN, **FOUR, "head_dim": 10, "shared_expert_intermediate_size": 40, "attention_bias": True},
    ),
    "flint, layers by name, every second": (
        "flint",
        {**QWEN, "head_dim": 8, "mlp_only_layers": [], "decoder_sparse_step": 2, "sliding_window": 5,
         "shared_expert_intermediate_size": 40, "norm_topk_prob": False,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "qwen3-next": ("qwen3_next", {**NEXT, "num_hidden_layers": 2, "full_attention_interval": 2}),
    "qwen3-next, layers by name, dense ones, tied": (
        "qwen3_next",
        {**NEXT, "layer_types": ["full_attention", "linear_attention", "linear_attention"], "mlp_only_layers": [0],
         "linear_conv_kernel_dim": 3, "norm_topk_prob": False, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "qwen3.5 with experts": ("qwen3_5_moe_text", {**NEXT, "num_hidden_layers": 2, "full_attention_interval": 2}),
    "lara": (
        "lara_mini",
        {**LARA, "num_hidden_layers": 5, "sliding_window": 5, "linear_conv_kernel_dim": 3},
    ),
    "lara, layers by name, biases, untied": (
        "lara_mini",
        {**LARA, "layer_types": ["full_attention", "linear_attention", "sliding_attention"], "sliding_window": 4,
         "norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "lfm2 with experts": ("lfm2_moe", LFM),
    "lfm2 with experts, biases, untied": (
        "lfm2_moe",
        {**LFM, "use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 2.5, "conv_bias": True,
         "num_dense_layers": 0, "tie_word_embeddings": False},
    ),
}  # fmt: skip
"""Maps the name of each case to its family and config."""
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ("mixtral", {"num_experts": 5}, "num_local_experts"),
    ("mixtral", {"num_experts_per_tok": 5}, "top=5 is more than the 4 experts"),
    ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window"),
    (
        "qwen3_moe",
        {"layer_types": ["sliding_attention"] * 3},
        '"layer_types" must be full_attention in every layer',
    ),
    ("qwen3_moe", {"mlp_only_layers": 2}, '"mlp_only_layers" must be a list'),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ("minimax_m2", {"rotary_dim": 12}, "rotary_dim is 12"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
    ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval"),
    ("dots1", {"n_group": 3}, "groups=3 must divide 4 experts"),
    ("exaone_moe", {"mlp_layer_types": ["sparse"]}, "a list of dense or sparse for 4 layers"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
    ("exaone_moe", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
    ("qwen3_next", {"attention_bias": True}, "attention_bias"),
    ("lfm2_moe", {"layer_types": None}, '"layer_types" must be a list with one of full_attention, conv'),
]
"""The family, a change of the first of its configs above, and a pattern of the error."""
