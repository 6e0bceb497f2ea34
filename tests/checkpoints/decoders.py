"""The oracle for decoders that are not Llama-like: transformers models of small configs with random weights.

Weights have standard deviation 0.3: at 0.02 attention is nearly uniform and wrong angles, heads or masks hide.
"""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from tests.checkpoints import decoder_rows, expert_rows, gemma3n_rows, gemma4_rows

GPT2 = {"vocab_size": 61, "n_positions": 32, "n_embd": 48, "n_layer": 3, "n_head": 6}
FALCON = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 32,
}
OLD = {**FALCON, "multi_query": False, "bias": True}
NEW = {**FALCON, "new_decoder_architecture": True}
STARCODER2 = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
NEOX = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 32,
}
BLOOM = {"vocab_size": 61, "hidden_size": 48, "n_layer": 3, "n_head": 6}
MPT = {"vocab_size": 61, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 32}

NORMED = {**STARCODER2, "head_dim": 8, "pad_token_id": None}  # a padding token's row would get no gradient
NO_HEAD_DIM = {key: value for key, value in NORMED.items() if key != "head_dim"}
GEMMA2 = {**NORMED, "query_pre_attn_scalar": 24, "sliding_window": 5}
FACTORS = {"embedding_multiplier": 12.0, "logits_scaling": 3.0, "residual_multiplier": 0.22}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "gpt2, gelu, n_inner, untied": (
        "gpt2",
        {**GPT2, "n_inner": 80, "activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "gpt2, scores not scaled": (
        "gpt2",
        {**GPT2, "scale_attn_weights": False, "reorder_and_upcast_attn": True},
    ),
    "santacoder (one kv head)": ("gpt_bigcode", GPT2),
    "starcoder (gelu)": ("gpt_bigcode", {**GPT2, "activation_function": "gelu", "n_inner": 96}),
    "gpt_bigcode, a key per head": ("gpt_bigcode", {**GPT2, "multi_query": False}),
    "falcon 7b": ("falcon", {**FALCON, "num_kv_heads": 6}),
    "falcon 7b, biases, linear scaling": (
        "falcon",
        {
            **FALCON,
            "bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        },
    ),
    "falcon, a key per head, side by side": ("falcon", OLD),
    "falcon, a key per head, one after the other": ("falcon", {**OLD, "parallel_attn": False}),
    "falcon, one key, one after the other": ("falcon", {**FALCON, "parallel_attn": False}),
    "falcon 40b": ("falcon", {**NEW, "num_kv_heads": 2}),
    "falcon 40b, a key per head": ("falcon", {**NEW, "bias": True}),
    "falcon 40b, one key": ("falcon", {**NEW, "num_kv_heads": 1, "tie_word_embeddings": False}),
    "falcon 11b (grouped, one norm)": ("falcon", {**NEW, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "starcoder2": ("starcoder2", STARCODER2),
    "starcoder2, window, theta": (
        "starcoder2",
        {**STARCODER2, "sliding_window": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "starcoder2, no biases, untied": (
        "starcoder2",
        {**STARCODER2, "use_bias": False, "tie_word_embeddings": False, "hidden_act": "gelu"},
    ),
    "pythia (gpt_neox)": ("gpt_neox", NEOX),
    "gpt_neox, one after the other, scaled, tied": (
        "gpt_neox",
        {
            **NEOX,
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rotary_pct": 0.5,
            "rotary_emb_base": 500,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
    ),
    "gpt_neox, all of a head turned": ("gpt_neox", {**NEOX, "rotary_pct": 1.0}),
    "phi": ("phi", NEOX),
    "phi, shared keys, tied": (
        "phi",
        {**NEOX, "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "bloom": ("bloom", BLOOM),
    "bloom, a power of two of heads, untied": ("bloom", {**BLOOM, "n_head": 4, "tie_word_embeddings": False}),
    "mpt": ("mpt", MPT),
    "granite": ("granite", {**NO_HEAD_DIM, **FACTORS, "attention_multiplier": 0.1}),
    "granite, biases, tied": (
        "granite",
        {
            **NO_HEAD_DIM,
            **FACTORS,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "attention_multiplier": 8**-0.5,
        },
    ),
    "olmo2": ("olmo2", NO_HEAD_DIM),
    "olmo3": (
        "olmo3",
        {
            **NO_HEAD_DIM,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 8,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "gemma": ("gemma", NORMED),
    "gemma2": ("gemma2", {**GEMMA2, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2, no caps, no windows": (
        "gemma2",
        {
            **GEMMA2,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention"] * 3,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **GEMMA2,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "mpt, a power of two of heads, scaled": (
        "mpt",
        {**MPT, "n_heads": 4, "attn_config": {"softmax_scale": 0.2}},
    ),
    **decoder_rows.CASES,
    **expert_rows.CASES,
    **gemma3n_rows.CASES,
    **gemma4_rows.CASES,
}
CASES = {name: case for name, case in CASES.items() if case[0] in CONFIG_MAPPING}  # of this transformers
IDS = torch.randint(0, 61, (2, 19), generator=torch.Generator().manual_seed(1))


def kernel(config: Any) -> str:
    """Returns the attention implementation of transformers to compare with: Falcon's "eager" adds ALiBi twice."""
    return "sdpa" if getattr(config, "alibi", False) else "eager"


def theirs(name: str, std: float = 0.3) -> Any:
    """Returns a case's transformers model in eval mode: every parameter is normal (norm gains around 1)."""
    family, settings = CASES[name]
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel(config))
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if not p.requires_grad and "expert" not in key:  # a table of sines
                continue
            gemma = family[:5] == "gemma" and family not in ("gemma3n_text", "gemma4_text")
            offset = gemma or family.startswith(("qwen3_5", "qwen3_next"))
            gain = key.endswith("weight") and p.dim() == 1 and not offset
            p.copy_(torch.randn(p.shape, generator=g) * std + gain)
        for key, buffer in model.named_buffers():
            if key.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn(buffer.shape, generator=g) * std)
            if key.endswith("layer_scalar"):
                buffer.copy_(1 + torch.randn(buffer.shape, generator=g) * std)
    return model.eval()


MAIN = (
    "gpt2",
    "santacoder (one kv head)",
    "falcon 7b",
    "falcon 40b",
    "starcoder2, window, theta",
    "pythia (gpt_neox)",
    "phi",
    "bloom",
    "mpt",
    "smollm3 (one layer of three without positions)",
    "phi3, half of a head turned, longrope",
    "glm",
    "cohere2",
    "codegen",
    "gpt-neo",
    "opt",
    "granite",
    "olmo2",
    "olmo3",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4, e2b",
    "exaone 4, windows",
    "hunyuan",
    "ministral3",
    "granite with windows",
    "nemotron",
    "nanochat",
    "bert as a decoder",
    "mixtral",
    "qwen3-moe",
    "qwen3.5",
    "lfm2",
    "qwen3-next",
    "mamba 2",
    "bamba",
    "granite 4 h, experts",
    "nemotron-h, experts, biases",
    "falcon-h1, factors, norms",
)
