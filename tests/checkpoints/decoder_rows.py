"""Configs of families that differ from LLaMA, GPT-2 or GPT-NeoX by a few switches, each with those switches."""

from typing import Any

from transformers import CONFIG_MAPPING

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
PAD = 2  # an id that is not in the texts: positions of RoBERTa count those of others
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
    "glm4": ("glm4", {**LLAMA, "head_dim": 12, "attention_bias": True}),
    "exaone 4": (
        "exaone4",
        {**LLAMA, "sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "exaone 4, windows": ("exaone4", {**LLAMA, "sliding_window": 5, "sliding_window_pattern": 3}),
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
    "hunyuan": ("hunyuan_v1_dense", {**LLAMA, "head_dim": 10, "attention_bias": True}),
    "hunyuan, alpha, tied": (
        "hunyuan_v1_dense",
        {**LLAMA, "head_dim": 8, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 500.0}},
    ),
    "cwm": ("cwm", {**LLAMA, "head_dim": 10, "sliding_window": 5, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "cwm, layers by name": (
        "cwm",
        {**LLAMA, "head_dim": 8, "layer_types": ["full_attention"] * 3, "rope_parameters": LLAMA3},
    ),
    "apertus": ("apertus", {**LLAMA, "rope_parameters": LLAMA3}),
    "apertus, biases, tied, relu squared": (
        "apertus",
        {**LLAMA, "attention_bias": True, "tie_word_embeddings": True, "hidden_act": "relu2",
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "ministral3": ("ministral3", {**LLAMA, "head_dim": 10, "rope_parameters": {**YARN, **MINISTRAL}}),
    "ministral3, windows, no scaling": (
        "ministral3",
        {**LLAMA, "head_dim": 8, "sliding_window": 5,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "llama_4_scaling_beta": 0.3,
                             "original_max_position_embeddings": 4}},
    ),
    "olmo": ("olmo", {**SIZES, "num_key_value_heads": 2}),
    "olmo, biases, tied": ("olmo", {**SIZES, "attention_bias": True, "tie_word_embeddings": True}),
    "vaultgemma": ("vaultgemma", {**LLAMA, "head_dim": 8, "query_pre_attn_scalar": 24, "sliding_window": 5,
                                  "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "hyperclovax": ("hyperclovax", {**LLAMA, "head_dim": 10, **FACTORS}),
    "hyperclovax, norms in front, biases": (
        "hyperclovax",
        {**LLAMA, **FACTORS, **BIASED, "use_post_norm": False, "attention_multiplier": 0.1},
    ),
    "granite with windows": (
        "granite_swa",
        {**LLAMA, **FACTORS, "sliding_window": 5, "attention_multiplier": 0.3, "layer_rope_theta": [500.0, 0, 70]},
    ),
    "granite with windows, one base, biases, untied": (
        "granite_swa",
        {**LLAMA, **BIASED, "sliding_window": 5, "attention_multiplier": 0.2, "tie_word_embeddings": False},
    ),
    "ctrl": ("ctrl", {"vocab_size": 61, "n_positions": 32, "n_embd": 48, "n_layer": 3, "n_head": 6, "dff": 80}),
    "xglm": ("xglm", XGLM),
    "xglm, not scaled, untied": ("xglm", {**XGLM, "scale_embedding": False, "tie_word_embeddings": False}),
    "modernbert's decoder": (
        "modernbert-decoder",
        {**SIZES, "pad_token_id": PAD, "local_attention": 10, "global_rope_theta": 500.0, "local_rope_theta": 70.0},
    ),
    "modernbert's decoder, biases, untied": (
        "modernbert-decoder",
        {**SIZES, **BIASED, "pad_token_id": PAD, "local_attention": 10, "norm_bias": True, "classifier_bias": True,
         "decoder_bias": False, "layer_types": ["sliding_attention"] * 3, "tie_word_embeddings": False},
    ),
    "bert as a decoder": ("bert", {**DECODES, "architectures": ["BertLMHeadModel"]}),
    "bert as a decoder, relu": ("bert", {**DECODES, "type_vocab_size": 1, "hidden_act": "relu"}),
    "roberta as a decoder": ("roberta", UNPADDED),
    "camembert as a decoder": ("camembert", {**UNPADDED, "type_vocab_size": 1}),
    "xlm-roberta as a decoder": ("xlm-roberta", UNPADDED),
    "data2vec as a decoder": ("data2vec-text", UNPADDED),
    "roberta with norms in front as a decoder": ("roberta-prelayernorm", UNPADDED),
    "electra as a decoder": ("electra", {**DECODES, "embedding_size": 32}),
    "megatron's bert as a decoder": ("megatron-bert", DECODES),
    "ernie as a decoder": ("ernie", DECODES),
    "roformer as a decoder": ("roformer", {**DECODES, "embedding_size": 32, "rotary_value": True}),
    "arcee": ("arcee", {**LLAMA, "head_dim": 10}),
    "arcee, biases, tied": ("arcee", {**LLAMA, **BIASED, "tie_word_embeddings": True}),
    "nemotron": ("nemotron", {**SIZES, "num_key_value_heads": 2}),
    "nemotron, biases, all of a head turned": (
        "nemotron",
        {**SIZES, "num_key_value_heads": 2, **BIASED, "head_dim": 10, "partial_rotary_factor": 1.0},
    ),
    "jais2": ("jais2", {**SIZES, "num_key_value_heads": 2}),
    "jais2, no biases": ("jais2", {**SIZES, "attention_bias": False, "mlp_bias": False, "layer_norm_eps": 1e-3}),
    "persimmon": ("persimmon", SIZES),
    "persimmon, no norms of queries": (
        "persimmon",
        {**SIZES, "num_attention_heads": 3, "qk_layernorm": False, "partial_rotary_factor": 0.25},
    ),
    "nanochat": ("nanochat", {**SIZES, "num_key_value_heads": 2}),
    "nanochat, biases, no cap": (
        "nanochat",
        {**SIZES, "attention_bias": True, "final_logit_softcapping": None, "rms_norm_eps": 1e-2},
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
    "qwen3.5": ("qwen3_5_text", {**QWEN3_5, "num_hidden_layers": 4, "rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0],
        "mrope_interleaved": True}}),
    "qwen3.5, layers by name, tied": (
        "qwen3_5_text",
        {**QWEN3_5, "layer_types": ["full_attention", "linear_attention", "full_attention"],
         "linear_conv_kernel_dim": 3, "linear_num_value_heads": 2, "tie_word_embeddings": True},
    ),
    # transformers writes convolutions of queries, keys and values in equal parts: only where they are equal is it right
    "olmo hybrid": ("olmo_hybrid", {**LLAMA, "num_hidden_layers": 2, "linear_value_head_dim": 6, "rope_parameters": {
        "rope_type": "default", "rope_theta": None}}),
    "olmo hybrid, layers by name, rotated, betas to 1, biases, tied": (
        "olmo_hybrid",
        {**LLAMA, "layer_types": ["full_attention", "linear_attention", "linear_attention"],
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 10, "linear_value_head_dim": 5,
         "linear_conv_kernel_dim": 3, "linear_allow_neg_eigval": False, "attention_bias": True,
         "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "lfm2": ("lfm2", {**LFM2, "full_attn_idxs": [1], "block_multiple_of": 16}),
    "lfm2, biases, layers by name, untied": (
        "lfm2",
        {**LFM2, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True, "conv_L_cache": 2,
         "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
    ),
    "mamba 2": ("mamba2", MAMBA2),
    "mamba 2, one group, biases, tied": (
        "mamba2",
        {**MAMBA2, "n_groups": 1, "use_bias": True, "use_conv_bias": False, "conv_kernel": 2, "expand": 1,
         "head_dim": 12, "tie_word_embeddings": True},
    ),
    "bamba": ("bamba", {**LLAMA, **MAMBA, "attn_layer_indices": [1]}),
    "bamba, biases, tied": (
        "bamba",
        {**LLAMA, **MAMBA, **BIASED, "mamba_proj_bias": True, "attn_layer_indices": [0, 2],
         "tie_word_embeddings": True},
    ),
    "granite 4 h, experts": ("granitemoehybrid", {**GRANITE, "num_local_experts": 4, "embedding_multiplier": 1.0}),
    "granite 4 h, dense": ("granitemoehybrid", {**GRANITE, "num_local_experts": 0, "tie_word_embeddings": True}),
    "granite 4, dense, no states, positions": (
        "granitemoehybrid",
        {**LLAMA, **FACTORS, "layer_types": ["full_attention"] * 3, "num_local_experts": 0, "attention_bias": True,
         "position_embedding_type": "rope", "mamba_n_heads": 4},
    ),
    "falcon-h1": ("falcon_h1", FALCON_H1),
    "falcon-h1, factors, norms": (
        "falcon_h1",
        {**FALCON_H1, **FALCON_H1_FACTORS, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
         "ssm_in_multiplier": 2.0, "attention_in_multiplier": 0.5, "tie_word_embeddings": True},
    ),
    "falcon-h1, factors, biases": (
        "falcon_h1",
        {**FALCON_H1, **FALCON_H1_FACTORS, **BIASED, "mamba_proj_bias": True, "projectors_bias": True,
         "mamba_conv_bias": False, "mamba_d_ssm": None, "mamba_expand": 1},
    ),
    "exaone 3": ("exaone", {**LLAMA, "head_dim": 10}),
    "exaone 3, biases, tied": ("exaone", {**LLAMA, **BIASED, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "apertus 1.5": ("apertus1p5_text", {**LLAMA, "rope_parameters": LLAMA3}),
    "nemotron-h": (
        "nemotron_h",
        {**NEMOTRON, "hybrid_override_pattern": "M-*-MM-", "mlp_bias": True, "time_step_min": 0.5,
         "attention_head_dim": 10, "rms_norm_eps": 1e-5, "time_step_rank": 3},
    ),
    "nemotron-h, experts, biases": (
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
         "use_bias": True, "use_conv_bias": False, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 2.5},
    ),
    "biogpt": ("biogpt", SIZES),
    "biogpt, embeddings not scaled": ("biogpt", {**SIZES, "scale_embedding": False}),
}  # fmt: skip
"""Name -> family, and config."""
EXAONE_REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("exaone", {"num_layers": 4}, "num_hidden_layers is 3 and num_layers 4, and both are one number"),
    ("apertus1p5_text", {"output_vocab_size": 50}, "output_vocab_size"),
]
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
    ("exaone4", {"layer_types": None}, "without sliding_window needs layer_types"),
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
    ("hunyuan_v1_dense", {"use_cla": True}, "use_cla"),
    ("cwm", {"rope_parameters": None}, "transformers has a scaling of its own for cwm"),
    ("apertus", {"rope_parameters": None}, "transformers has a scaling of its own for apertus"),
    ("ministral3", {"rope_parameters": YARN | {"factor": 4.0}}, 'lacks "llama_4_scaling_beta"'),
    ("olmo", {"clip_qkv": 8.0}, "clip_qkv"),
    ("granite_swa", {"layer_rope_theta": [500.0]}, "layer_rope_theta"),
    ("ctrl", {"layer_norm_epsilon": 1e-5}, "layer_norm_epsilon"),
    ("xglm", {"pad_token_id": 2}, "must be 0 or 1"),
    ("bert", {"architectures": ["BertForMaskedLM"]}, "is_decoder is True"),
    ("bert", {"is_decoder": False, "architectures": ["BertLMHeadModel"]}, "is_decoder is False"),
    ("persimmon", {"hidden_dropout": 0.1}, "hidden_dropout"),
    ("nanochat", {"rope_parameters": {**YARN, "factor": 4.0}}, "multiply queries and keys by"),
    ("gptj", {"rotary_dim": 13}, "rotary_dim 13 must be even and at most the 12 dims"),
    ("gptj", {"rotary": False}, "rotary"),
    ("codegen", {"n_head": 6}, "n_head 6 of a codegen must be a multiple of 4"),
    ("gpt_neo", {"attention_types": [[["global", "local"], 1]]}, '"attention_types" must be like'),
    ("gpt_neo", {"attention_types": [[["block"], 3]]}, '"attention_types" must be like'),
    ("gpt_neo", {"attention_layers": ["global"] * 3}, "attention_layers"),
    ("openai-gpt", {"afn": "gelu_fast"}, "there is no activation 'gelu_fast'"),
    ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim 32 is not hidden_size 48"),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
    ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act gelu is that of convolutions in transformers, too"),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate"),
    (
        "qwen3_5_text",
        {"layer_types": ["sliding_attention"] * 4},
        "known are full_attention, linear_attention",
    ),
    ("lfm2", {"full_attn_idxs": 2}, '"full_attn_idxs" must be a list of numbers of layers'),
    ("lfm2", {"use_pos_enc": False}, "use_pos_enc"),
    ("mamba2", {"head_dim": 12}, "num_heads 4 of head_dim 12 are not expand x hidden_size = 96"),
    ("mamba2", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
    ("mamba2", {"hidden_act": "gelu"}, "hidden_act gelu is that of convolutions in transformers, too"),
    ("bamba", {"attn_layer_indices": 2}, '"attn_layer_indices" must be a list of numbers of layers'),
    (
        "granitemoehybrid",
        {"position_embedding_type": "alibi"},
        '"position_embedding_type" must be null, "nope"',
    ),
    ("biogpt", {"layerdrop": 0.1}, "layerdrop"),
    ("falcon_h1", {"mamba_d_head": 8}, "mamba_n_heads 4 of mamba_d_head 8 are not 40"),
    ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers"),
    ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate is true"),
    ("falcon_h1", {"projectors_bias": True}, "mamba_proj_bias and projectors_bias differ"),
    (
        "falcon_h1",
        {"attention_bias": True, "attention_in_multiplier": 2.0},
        "attention_in_multiplier is 2.0 beside att",
    ),
    (
        "falcon_h1",
        {"mamba_proj_bias": True, "projectors_bias": True, "ssm_in_multiplier": 2.0},
        "ssm_in_multiplier is 2.0 beside biases",
    ),
    (
        "nemotron_h",
        {"hybrid_override_pattern": "-M*"},
        "layer 0 is mlp, with none before it that mixes tokens",
    ),
    (
        "nemotron_h",
        {"hybrid_override_pattern": "M-E"},
        "layer 2 is moe, with none before it that mixes tokens",
    ),
    ("nemotron_h", {"hybrid_override_pattern": "MX"}, '"layers_block_type" must be the kinds of layers'),
    ("nemotron_h", {"moe_latent_size": 8}, "moe_latent_size"),
    (
        "nemotron_h",
        {"attention_head_dim": 8},
        '"attention_head_dim" must be 10, which is what transformers takes',
    ),
    ("falcon_h1", {"attn_layer_indices": [1]}, "attn_layer_indices"),
    ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    *(row for row in EXAONE_REFUSED if row[0] in CONFIG_MAPPING),  # of 5.24
]
"""Family, change of the first of its configs above, what the error says."""
