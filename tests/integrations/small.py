"""Makes small configs and models of the model types of the installed `transformers`, by rule.

A config has the sizes of `SIZES` in place of its defaults, and enough layers to have every kind of layer that its
defaults have.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import AutoConfig

WINDOW, VOCAB = 5, 61
SIZES: tuple[tuple[str, int], ...] = (
    (r"(\w+_)?num_attention_heads|n_heads?|num_heads|\w+_attention_heads|attention_heads|heads_per_ngram", 4),
    (r"(swa_)?num_key_value_heads|num_kv_heads|kv_n_heads|linear_num_key_heads|n_groups", 2),
    (r"linear_num_value_heads|linear_num_heads|index_n_heads|mamba_n_heads|mamba_num_heads", 4),
    (r"(swa_|linear_|linear_key_|linear_value_|v_|mamba_)?head_dim|kv_channels|d_head|d_kv|qk_\w+_head_dim", 8),
    (r"index_head_dim|(kv|q|o)_lora_rank|mamba_d_state|state_size|ssm_state_size|dim_head|ple_embed_dim", 16),
    (r"rotary_dim", 4),
    (r"(?!attention_)(\w+_)?hidden_size|d_model|n_embd|emb_dim|dim|embedding_size|hidden_dim|mamba_d_ssm", 32),
    (r"entity_emb_size", 32),
    (r"\w*intermediate_size(_mlp)?|\w*ffn_dim|d_ff|n_inner|\w*ffn_hidden_size|d_inner|dff|dim_ff|mlp_dim", 48),
    (r"(\w+_)?(num_hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|depth)", 2),
    (r"(\w+_)?vocab_size|vocab_size_per_layer_input|encoder_hash_byte_group_vocab", VOCAB),
    (r"ngram_vocab_size_base", 64),
    (r"max_(\w+_)?position_embeddings|max_seq_len|max_source_positions|n_positions|n_ctx|model_max_length", 64),
    (r"sliding_window(_size)?|attention_chunk_size|window_size|local_attention_window_len", WINDOW),
    (r"index_topk", WINDOW),
    (r"(moe_)?num_(local_)?experts|n_routed_experts", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|n_group|num_expert_group", 2),
    (r"topk_group|num_codebooks", 1),
    (r"pad_token_id", 0),
    (r"bos_token_id|decoder_start_token_id|cls_token_id", 1),
    (r"eos_token_id|sep_token_id|forced_eos_token_id", 2),
)  # fmt: skip
"""Patterns of names of config values, and their small values; the first pattern that matches counts."""
UNSAID = ("vocab_size", "num_key_value_heads", "head_dim", "num_experts_per_tok")
"""Names whose value is set even if the default is None."""
KINDS = ["sliding_attention"] * 4 + ["full_attention"]
MORE: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 500.0}}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 16},
    "gemma3n_text": {
        "num_hidden_layers": 10, "num_kv_shared_layers": 5, "layer_types": KINDS * 2, "intermediate_size": 48,
        "activation_sparsity_pattern": [0.9] * 10,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "esm": {"mask_token_id": 3, "pad_token_id": 0},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "mobilebert": {"intra_bottleneck_size": 32},
    "neomme": {"head_dim": 16},
    "perceiver": {"d_latents": 32, "num_latents": 8, "num_blocks": 1, "num_self_attends_per_block": 2},
    "qwen4_exp_text": {
        "indexer_budget": 8, "indexer_compress_ratio": 4, "indexer_head_dim": 8, "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "ngram_vocab_size_base": 64,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": WINDOW},
    "reformer": {"axial_pos_embds_dim": (8, 24), "axial_pos_shape": (8, 8)},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
}  # fmt: skip
"""Further values that a model type needs."""
MOST = 20_000_000
"""Largest number of parameters of a small model."""


def small(default: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the small values that replace defaults of a config."""
    values: dict[str, Any] = {}
    for key, value in default.items():
        size = next((size for name, size in SIZES if re.fullmatch(name, key)), None)
        if isinstance(value, dict) and "model_type" in value:
            values[key] = {"model_type": value["model_type"], **small(value)}
        elif size is None or isinstance(value, bool):
            continue
        elif (
            key in UNSAID if value is None else isinstance(value, int) and (value > size or "token_id" in key)
        ):
            values[key] = size
    kinds = default.get("layer_types", default.get("layers_block_type"))
    if isinstance(kinds, list) and "num_hidden_layers" in default:
        count = max(2, *(kinds.index(kind) + 1 for kind in kinds))
        values["num_hidden_layers"] = count
        values |= {
            key: default[key][:count] for key in ("layer_types", "layers_block_type") if default.get(key)
        }
    heads = default.get("num_attention_heads")
    if heads is not None and heads == default.get("num_key_value_heads"):
        values["num_key_value_heads"] = values.get("num_attention_heads", heads)
    return values | MORE.get(default.get("model_type", ""), {})


def small_model(kind: str, name: str, **fields: Any) -> Any:
    """Returns a model of class `name` and model type `kind`, with weights normal with deviation 0.3 around 0, or around
    their initial values for vectors. Raises whatever `transformers` raises if it cannot make one."""
    model_class = getattr(transformers, name)
    values = small(AutoConfig.for_model(kind).to_dict())
    config = AutoConfig.for_model(kind, **values)
    if not isinstance(config, model_class.config_class):
        parts = [getattr(config, part) for part in config.sub_configs]
        config = next((part for part in parts if isinstance(part, model_class.config_class)), config)
    for key, value in fields.items():
        if hasattr(config, key):
            setattr(config, key, value)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if count > MOST:
        raise ValueError(f"it has {count:,} parameters")
    torch.manual_seed(0)
    model = model_class(config)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.copy_(torch.randn(p.shape, generator=draw) * 0.3 + (p if p.dim() < 2 else 0.0))
    return model.eval()
