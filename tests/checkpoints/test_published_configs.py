"""Published config.json files as their authors wrote them: read, counted right, and written back to the same spec."""

import pytest

from headway.checkpoints import config_from_spec, spec_from_config
from headway.models import catalog, cost
from headway.patterns import Causal, Full, Window
from headway.positions import LinearScaling, Llama3, PerLayer, Rotary, YaRN

COMMON = {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True, "transformers_version": "4.4x"}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **COMMON}
LLAMA31 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}

PUBLISHED = {
    "LLaMA 7B (2023, without max_position_embeddings and num_key_value_heads)": (
        LLAMA | {"hidden_size": 4096, "intermediate_size": 11008, "max_sequence_length": 2048,
                 "num_attention_heads": 32, "num_hidden_layers": 32,
                 "pad_token_id": 0, "rms_norm_eps": 1e-06, "torch_dtype": "float16",
                 "vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False},
        6_738_415_616, Rotary(pairing="halves"), {Causal()}, 2048),
    "Llama 3.1 8B": (
        LLAMA | {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001,
                 "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
                 "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
                 "rms_norm_eps": 1e-05, "rope_scaling": LLAMA31, "rope_theta": 500000.0, "tie_word_embeddings": False,
                 "torch_dtype": "bfloat16", "vocab_size": 128256},
        8_030_261_248, Rotary(5e5, pairing="halves", scaling=Llama3(8.0, 1.0, 4.0, 8192)), {Causal()}, 131072),
    "Llama 3.2 1B": (
        LLAMA | {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
                 "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_size": 2048,
                 "intermediate_size": 8192,
                 "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
                 "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
                 "rope_scaling": LLAMA31 | {"factor": 32.0}, "rope_theta": 500000.0, "tie_word_embeddings": True,
                 "torch_dtype": "bfloat16", "vocab_size": 128256},
        1_235_814_400, Rotary(5e5, pairing="halves", scaling=Llama3(32.0, 1.0, 4.0, 8192)), {Causal()}, 131072),
    "deepseek-coder 1.3b": (
        LLAMA | {"bos_token_id": 32013, "eos_token_id": 32014, "hidden_size": 2048, "intermediate_size": 5504,
                 "max_position_embeddings": 16384, "num_attention_heads": 16, "num_hidden_layers": 24,
                 "num_key_value_heads": 16, "pretraining_tp": 1, "rms_norm_eps": 1e-06,
                 "rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000,
                 "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32256},
        1_346_471_936, Rotary(1e5, pairing="halves", scaling=LinearScaling(4.0)), {Causal()}, 16384),
    "SmolLM2 135M": (
        LLAMA | {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0,
                 "hidden_size": 576, "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
                 "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False, "num_attention_heads": 9,
                 "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
                 "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
                 "torch_dtype": "bfloat16", "vocab_size": 49152},
        134_515_008, Rotary(1e5, pairing="halves"), {Causal()}, 8192),
    "Mistral 7B v0.1": (
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **COMMON, "bos_token_id": 1,
         "eos_token_id": 2, "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
         "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
         "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
         "vocab_size": 32000},
        7_241_732_096, Rotary(pairing="halves"), {Window.last(4096)}, 32768),
    "Qwen2.5 7B, with the YaRN of its model card": (
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **COMMON, "attention_dropout": 0.0,
         "bos_token_id": 151643, "eos_token_id": 151645, "hidden_size": 3584, "intermediate_size": 18944,
         "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
         "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
         "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_mrope": False, "use_sliding_window": False,
         "vocab_size": 152064,
         "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
        7_615_616_512, Rotary(1e6, pairing="halves", scaling=YaRN(4.0, 32768)), {Causal()}, 131072),
    "Qwen3 0.6B": (
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **COMMON, "attention_bias": False,
         "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_size": 1024,
         "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
         "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
         "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
         "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936},
        596_049_920, Rotary(1e6, pairing="halves"), {Causal()}, 40960),
    "ModernBERT base (of its card: 149 million, and the bias of the output)": (
        {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], "attention_bias": False,
         "attention_dropout": 0.0, "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0,
         "classifier_pooling": "mean", "decoder_bias": True, "deterministic_flash_attn": False,
         "embedding_dropout": 0.0, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
         "gradient_checkpointing": False, "hidden_activation": "gelu", "hidden_size": 768,
         "initializer_cutoff_factor": 2.0, "initializer_range": 0.02, "intermediate_size": 1152,
         "layer_norm_eps": 1e-05, "local_attention": 128, "local_rope_theta": 10000.0, "max_position_embeddings": 8192,
         "mlp_bias": False, "mlp_dropout": 0.0, "norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": 12,
         "num_hidden_layers": 22, "position_embedding_type": "absolute", "sep_token_id": 50282,
         "cls_token_id": 50281, "tie_word_embeddings": True, "vocab_size": 50368},
        149_655_232, PerLayer((Rotary(1.6e5, pairing="halves"), *[Rotary(1e4, pairing="halves")] * 2)),
        {Full(), Window.around(64)}, 8192),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config(name):
    config, count, positions, patterns, context = PUBLISHED[name]
    spec = spec_from_config(config)
    assert cost.parameter_count(spec) == count
    assert spec.positions == positions
    assert set(spec.patterns) == patterns
    assert (spec.trained_context, spec.max_context) == (context, None)
    assert spec_from_config(config_from_spec(spec)) == spec
    assert config_from_spec(spec)["model_type"] == config["model_type"]


@pytest.mark.parametrize("name", catalog.names())
def test_every_named_size_has_a_config_that_transformers_can_read(name):
    spec = catalog.spec(name)
    config = config_from_spec(spec)
    # Marian has biases where the Transformer of 2017 has none; NEZHA is no longer in transformers
    assert (config["model_type"] == "headway") == (spec.family in ("transformer", "nezha"))
    assert spec_from_config(config) == spec
