"""Configs of families that differ from LLaMA, GPT-2 or GPT-NeoX by a few switches, each with those switches."""

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 32,
    "pad_token_id": None,  # whose row would get no gradient
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
BIASED = {"attention_bias": True, "mlp_bias": True}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3 (one layer of three without positions)": (
        "smollm3",
        {**LLAMA, "no_rope_layer_interval": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "smollm3, windows, biases, untied": (
        "smollm3",
        {**LLAMA, **BIASED, "no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 5,
         "tie_word_embeddings": False},
    ),
    "phi3": ("phi3", {**LLAMA, "sliding_window": 5}),
    "phi3, half of a head turned, longrope": (
        "phi3",
        {**LLAMA, "partial_rotary_factor": 0.5, "rope_parameters": LONG, "max_position_embeddings": 64,
         "original_max_position_embeddings": 6, "tie_word_embeddings": True},
    ),
    "glm": ("glm", {**LLAMA, "head_dim": 12}),
    "glm, no biases, all of a head turned": (
        "glm",
        {**LLAMA, "head_dim": 8, "attention_bias": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}},
    ),
    "ernie 4.5": ("ernie4_5", {**LLAMA, "head_dim": 10}),
    "ernie 4.5, biases, untied": (
        "ernie4_5",
        {**LLAMA, "head_dim": 8, "use_bias": True, "tie_word_embeddings": False},
    ),
    "helium, biases": ("helium", {**LLAMA, **BIASED, "head_dim": 8}),
    "seed-oss": ("seed_oss", {**LLAMA, "head_dim": 10, "attention_out_bias": True, "mlp_bias": True}),
    "internlm3, biases": ("internlm3", {**LLAMA, **BIASED, "head_dim": 8}),
    "iquestcoder": ("iquestcoder", {**LLAMA, "head_dim": 8, "attention_bias": True}),
    "cohere": ("cohere", COHERE),
    "cohere, biases, untied": ("cohere", {**COHERE, "attention_bias": True, "tie_word_embeddings": False}),
    "cohere2": ("cohere2", {**COHERE, "sliding_window": 5, "sliding_window_pattern": 3}),
    "cohere2, layers by name, biases": (
        "cohere2",
        {**COHERE, "sliding_window": 5, "attention_bias": True,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "stablelm": ("stablelm", {**SIZES, "num_attention_heads": 3, "num_key_value_heads": 1, "use_qkv_bias": True}),
    "stablelm, side by side, tied": (
        "stablelm",
        {**SIZES, "num_key_value_heads": 6, "use_parallel_residual": True, "partial_rotary_factor": 0.5,
         "tie_word_embeddings": True},
    ),
    "gpt-j": ("gptj", GPTJ),
    "gpt-j, all of a head turned, n_inner, tied": (
        "gptj",
        {**GPTJ, "rotary_dim": 12, "n_inner": 80, "tie_word_embeddings": True},
    ),
    "codegen": ("codegen", {**GPTJ, "n_head": 8, "rotary_dim": 4}),
    "gpt-neo": ("gpt_neo", NEO),
    "gpt-neo, no windows, untied": (
        "gpt_neo",
        {**NEO, "attention_types": [[["global"], 3]], "intermediate_size": 80, "tie_word_embeddings": False},
    ),
    "gpt (openai-gpt)": (
        "openai-gpt",
        {"vocab_size": 61, "n_positions": 32, "n_embd": 48, "n_layer": 3, "n_head": 6},
    ),
    "opt": ("opt", OPT),
    "opt, norms behind, no biases, untied": (
        "opt",
        {**OPT, "do_layer_norm_before": False, "enable_bias": False, "tie_word_embeddings": False},
    ),
    "opt, no last norm": ("opt", {**OPT, "_remove_final_layer_norm": True}),
    "biogpt": ("biogpt", SIZES),
    "biogpt, embeddings not scaled": ("biogpt", {**SIZES, "scale_embedding": False}),
}  # fmt: skip
"""Name -> family, and config."""
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("smollm3", {"no_rope_layers": [1, 0]}, '"no_rope_layers" must be a list of 1 .rotary. or 0'),
    ("smollm3", {"layer_types": ["sliding_attention"] * 3}, "but there is no window"),
    (
        "phi3",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 16}},
        "LinearScaling in a phi3",
    ),
    ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop"),
    ("glm", {"mlp_bias": True}, '"mlp_bias" is True, which is unsupported'),
    ("ernie4_5", {"attention_dropout": 0.1}, "attention_dropout"),
    ("helium", {"head_dim": 10}, "6 heads of head_dim 10 are not hidden_size 48"),
    ("internlm3", {"mlp_bias": False}, "qkv_bias differs from its bias"),
    ("internlm3", {"qkv_bias": True}, '"qkv_bias" is True, which is unsupported'),
    ("iquestcoder", {"clip_qkv": 8.0}, "clip_qkv"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
    ("cohere2", {"layer_switch": 2}, "layer_switch is 2, but every 3th layer is full"),
    ("cohere2", {"head_dim": 10}, "head_dim is 10, but transformers makes it hidden_size 48 / 6 heads"),
    ("cohere2", {"position_embedding_type": "alibi"}, "position_embedding_type"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
    ("stablelm", {"hidden_dropout": 0.1}, "hidden_dropout"),
    ("gptj", {"rotary_dim": 13}, "rotary_dim 13 must be even and at most the 12 dims"),
    ("gptj", {"rotary": False}, "rotary"),
    ("codegen", {"n_head": 6}, "n_head 6 of a codegen must be a multiple of 4"),
    ("gpt_neo", {"attention_types": [[["global", "local"], 1]]}, '"attention_types" must be like'),
    ("gpt_neo", {"attention_types": [[["block"], 3]]}, '"attention_types" must be like'),
    ("gpt_neo", {"attention_layers": ["global"] * 3}, "attention_layers"),
    ("openai-gpt", {"afn": "gelu_fast"}, "there is no activation 'gelu_fast'"),
    ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim 32 is not hidden_size 48"),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
    ("biogpt", {"layerdrop": 0.1}, "layerdrop"),
]
"""Family, change of the first of its configs above, what the error says."""
