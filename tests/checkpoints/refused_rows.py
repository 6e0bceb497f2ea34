"""Changes of decoder configs that are refused, and patterns of the errors."""

from typing import Any

from transformers import CONFIG_MAPPING

from tests.checkpoints.decoder_sizes import YARN

EXAONE_REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("exaone", {"num_layers": 4}, "num_hidden_layers is 3, but its older name num_layers is 4"),
    ("apertus1p5_text", {"output_vocab_size": 50}, "output_vocab_size"),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("smollm3", {"no_rope_layers": [1, 0]}, '"no_rope_layers" must be a list of 1 .rotary. or 0'),
    ("smollm3", {"layer_types": ["sliding_attention"] * 3}, "but no window is set"),
    (
        "phi3",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 16}},
        "LinearScaling is unsupported in a phi3",
    ),
    ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop"),
    ("glm", {"mlp_bias": True}, '"mlp_bias" is True, which is unsupported'),
    ("exaone4", {"layer_types": None}, "without sliding_window needs layer_types"),
    ("ernie4_5", {"attention_dropout": 0.1}, "attention_dropout"),
    ("helium", {"head_dim": 10}, "6 x head_dim 10 of a helium must be hidden_size 48"),
    ("internlm3", {"mlp_bias": False}, "qkv_bias and bias of an internlm3 must be equal"),
    ("internlm3", {"qkv_bias": True}, '"qkv_bias" is True, which is unsupported'),
    ("iquestcoder", {"clip_qkv": 8.0}, "clip_qkv"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
    ("cohere2", {"layer_switch": 2}, "layer_switch is 2, but every 3th layer is full"),
    (
        "cohere2",
        {"head_dim": 10},
        "head_dim is 10, but transformers computes it as hidden_size 48 / num_attention_heads 6",
    ),
    ("cohere2", {"position_embedding_type": "alibi"}, "position_embedding_type"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
    ("stablelm", {"hidden_dropout": 0.1}, "hidden_dropout"),
    ("hunyuan_v1_dense", {"use_cla": True}, "use_cla"),
    ("cwm", {"rope_parameters": None}, "transformers has a default of its own in cwm"),
    ("apertus", {"rope_parameters": None}, "transformers has a default of its own in apertus"),
    ("ministral3", {"rope_parameters": YARN | {"factor": 4.0}}, 'lacks "llama_4_scaling_beta"'),
    ("olmo", {"clip_qkv": 8.0}, "clip_qkv"),
    ("granite_swa", {"layer_rope_theta": [500.0]}, "layer_rope_theta"),
    ("ctrl", {"layer_norm_epsilon": 1e-5}, "layer_norm_epsilon"),
    ("xglm", {"pad_token_id": 2}, "must be 0 or 1"),
    ("bert", {"architectures": ["BertForMaskedLM"]}, "is_decoder is True"),
    ("bert", {"is_decoder": False, "architectures": ["BertLMHeadModel"]}, "is_decoder is False"),
    ("persimmon", {"hidden_dropout": 0.1}, "hidden_dropout"),
    ("nanochat", {"rope_parameters": {**YARN, "factor": 4.0}}, "scale queries and keys by"),
    ("gptj", {"rotary_dim": 13}, "rotary_dim 13 must be even and at most the 12 dims"),
    ("gptj", {"rotary": False}, "rotary"),
    ("codegen", {"n_head": 6}, "n_head of a codegen must be a multiple of 4"),
    ("gpt_neo", {"attention_types": [[["global", "local"], 1]]}, '"attention_types" must be like'),
    ("gpt_neo", {"attention_types": [[["block"], 3]]}, '"attention_types" must be like'),
    ("gpt_neo", {"attention_layers": ["global"] * 3}, "attention_layers"),
    ("openai-gpt", {"afn": "gelu_fast"}, "there is no activation 'gelu_fast'"),
    (
        "opt",
        {"word_embed_proj_dim": 32},
        "word_embed_proj_dim 32 is unsupported; it must equal hidden_size 48",
    ),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
    ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act must be silu, got gelu"),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate"),
    (
        "qwen3_5_text",
        {"layer_types": ["sliding_attention"] * 4},
        "known are full_attention, linear_attention",
    ),
    ("lfm2", {"full_attn_idxs": 2}, '"full_attn_idxs" must be a list of numbers of layers'),
    ("lfm2", {"use_pos_enc": False}, "use_pos_enc"),
    ("mamba2", {"head_dim": 12}, "num_heads 4 x head_dim 12 must be expand x hidden_size = 96"),
    ("mamba2", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
    ("mamba2", {"hidden_act": "gelu"}, "hidden_act must be silu, got gelu"),
    ("bamba", {"attn_layer_indices": 2}, '"attn_layer_indices" must be a list of numbers of layers'),
    (
        "granitemoehybrid",
        {"position_embedding_type": "alibi"},
        '"position_embedding_type" must be null, "nope"',
    ),
    ("biogpt", {"layerdrop": 0.1}, "layerdrop"),
    ("falcon_h1", {"mamba_d_head": 8}, "mamba_n_heads 4 x mamba_d_head 8 must be the inner width 40"),
    ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers"),
    ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate true is unsupported"),
    ("falcon_h1", {"projectors_bias": True}, "mamba_proj_bias and projectors_bias must be equal"),
    (
        "falcon_h1",
        {"attention_bias": True, "attention_in_multiplier": 2.0},
        "attention_in_multiplier must be 1 if attention_bias is true, got 2.0",
    ),
    (
        "falcon_h1",
        {"mamba_proj_bias": True, "projectors_bias": True, "ssm_in_multiplier": 2.0},
        "ssm_in_multiplier must be 1 if mamba_proj_bias is true, got 2.0",
    ),
    (
        "nemotron_h",
        {"hybrid_override_pattern": "-M*"},
        "layer 0 is mlp, which must directly follow an attention or mamba layer",
    ),
    (
        "nemotron_h",
        {"hybrid_override_pattern": "M-E"},
        "layer 2 is moe, which must directly follow an attention or mamba layer",
    ),
    (
        "nemotron_h",
        {"hybrid_override_pattern": "MX"},
        '"hybrid_override_pattern" must be a text of the letters',
    ),
    ("nemotron_h", {"moe_latent_size": 8}, "moe_latent_size"),
    (
        "nemotron_h",
        {"attention_head_dim": 8},
        '"attention_head_dim" must be 10, which transformers uses',
    ),
    ("falcon_h1", {"attn_layer_indices": [1]}, "attn_layer_indices"),
    ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    *(
        row for row in EXAONE_REFUSED if row[0] in CONFIG_MAPPING
    ),  # families that transformers knows from 5.24 on
]
"""The family, a change of the first of its configs in decoder_rows, and a pattern of the error."""
