"""Published config.json files of decoders that are not Llama-like give the catalog's specs and parameter counts."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headway.checkpoints import config_from_spec, spec_from_config
from headway.models import catalog, cost

PUBLISHED = {
    "gpt2": {"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
             "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
             "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
             "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
             "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
             "summary_use_proj": True, "vocab_size": 50257,
             "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}},
    "starcoderbase": {"activation_function": "gelu", "architectures": ["GPTBigCodeForCausalLM"],
                      "attention_softmax_in_fp32": True, "attn_pdrop": 0.1, "embd_pdrop": 0.1,
                      "inference_runner": 0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
                      "max_batch_size": None, "max_sequence_length": None, "model_type": "gpt_bigcode",
                      "multi_query": True, "n_embd": 6144, "n_head": 48, "n_inner": 24576, "n_layer": 40,
                      "n_positions": 8192, "pad_key_length": True, "pre_allocate_kv_cache": False,
                      "resid_pdrop": 0.1, "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True,
                      "validate_runner_input": True, "vocab_size": 49152},
    "falcon-7b": {"alibi": False, "apply_residual_connection_post_layernorm": False,
                  "architectures": ["FalconForCausalLM"], "attention_dropout": 0.0, "bias": False,
                  "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "hidden_size": 4544,
                  "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon",
                  "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71,
                  "num_hidden_layers": 32, "parallel_attn": True, "torch_dtype": "bfloat16", "vocab_size": 65024},
    "falcon-40b": {"alibi": False, "architectures": ["FalconForCausalLM"], "attention_dropout": 0.0, "bias": False,
                   "hidden_dropout": 0.0, "hidden_size": 8192, "initializer_range": 0.02,
                   "layer_norm_epsilon": 1e-05, "model_type": "falcon", "new_decoder_architecture": True,
                   "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8, "parallel_attn": True,
                   "vocab_size": 65024},
    "starcoder2-3b": {"architectures": ["Starcoder2ForCausalLM"], "activation_function": "gelu",
                      "attention_softmax_in_fp32": True, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072,
                      "initializer_range": 0.02, "intermediate_size": 12288, "layer_norm_epsilon": 1e-05,
                      "max_position_embeddings": 16384, "mlp_type": "default", "model_type": "starcoder2",
                      "norm_epsilon": 1e-05, "num_attention_heads": 24, "num_hidden_layers": 30,
                      "num_key_value_heads": 2, "rope_theta": 999999.4420358813,
                      "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "sliding_window": 4096,
                      "use_bias": True, "use_cache": True, "vocab_size": 49152},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_the_catalog_s(name: str) -> None:
    spec = spec_from_config(PUBLISHED[name])
    assert spec == catalog.spec(name)
    assert spec_from_config(config_from_spec(spec)) == spec


FAMILIES = ("gpt2", "gpt_bigcode", "starcoder2", "mixtral", "gpt_oss", "falcon")


@pytest.mark.parametrize("name", [name for name in catalog.names() if catalog.spec(name).family in FAMILIES])
def test_counts_are_those_of_their_module(name: str) -> None:
    spec = catalog.spec(name)
    config = config_from_spec(spec)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert sum(p.numel() for p in model.parameters()) == cost.parameter_count(spec)
