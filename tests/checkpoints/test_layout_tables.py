"""The tables of `checkpoints.hf.layouts` against the values that `transformers` takes for absent keys, row by row."""

from collections.abc import Mapping
from typing import Any

import pytest
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from headway.checkpoints.hf.harmless import HARMLESS
from headway.checkpoints.hf.layouts import LAYOUTS
from headway.checkpoints.hf.layouts.base import ONLY
from tests import families

OLDER_DEFAULTS = {
    ("qwen2", "sliding_window"): 4096,  # if use_sliding_window is set; transformers' is None if not
    ("qwen3", "sliding_window"): 4096,
    ("gpt_neox", "rotary_pct"): 0.25,
    ("bloom", "seq_length"): 2048,
    ("minimax_m2", "partial_rotary_factor"): 1.0,
    ("ernie4_5_moe", "moe_layer_end_index"): -1,  # transformers replaces it by the index of the last layer
    ("t5", "n_positions"): 512,
    ("mt5", "n_positions"): 512,
}
"""Defaults of earlier versions; this version of transformers has the keys under another name, or not at all."""
OLDER_ONLY: dict[str, tuple[Any, ...]] = {
    "add_bias_logits": (False,), "add_cross_attention": (False,), "add_final_layer_norm": (False, True),
    "apply_residual_connection_post_layernorm": (False,), "attention_bias": (False,),
    "activation_dropout": (0.0,), "attention_dropout": (0.0,), "attention_mode": ("longformer",), "auto_map": ({},),
    "classifier_dropout": (), "clip_qkv": (), "cross_attention_hidden_size": (), "gradient_checkpointing": (False,),
    "ignore_attention_mask": (False,), "n_special": (0,), "order_of_interleaved_layers": ("local_attn_first",),
    "rotary": (True,), "rotary_pct": (1,), "use_embedding_sharing": (True,), "use_gated_activation": (True,),
    "use_parallel_block": (True,), "use_qk_norm": (False, True), "use_cla": (False,), "causal_mask": (True,),
    "is_causal": (True,), "attn_pdrop": (0.0, 0.1), "sparse_prediction": (False,),
    "hidden_act": ("gelu_pytorch_tanh",), "hidden_activation": ("gelu_pytorch_tanh",),
    "is_decoder": (False, True), "is_llama_config": (True,), "max_window_layers": (), "mlp_bias": (False,),
    "mlp_type": ("default",), "norm_type": ("layer_norm",), "normalize_before": (False, True),
    "normalize_embedding": (False, True), "partial_rotary_factor": (1, 1.0), "pruned_heads": ({},),
    "position_embedding_type": ("absolute", "rope_gptj"),
    "quantization_config": (), "reorder_and_upcast_attn": (False, True), "rope_interleaved": (False,),
    "scale_attn_by_inverse_layer_idx": (False,), "scale_attn_weights": (True,), "sliding_window": (),
    "do_blenderbot_90_layernorm": (False,), "extra_layer_norm": (False,), "first_k_dense_replace": (0,),
    "layernorm_variant": ("prelayernorm",),
    "tie_weights_": (True,),
    "static_position_embeddings": (False, True), "tie_encoder_decoder": (False,), "use_mrope": (False,),
    "use_sliding_window": (False,), "attn_output_gate": (True,), "mlp_only_layers": ([],), "rope_theta": (),
    "output_gate_type": ("swish",),
    "use_pos_enc": (True,), "block_use_swiglu": (True,), "route_norm": (True,), "score_func": ("sigmoid",),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), (1,)),
    "rms_norm": (True,), "normalization_function": ("rmsnorm",), "mamba_use_mlp": (True,), "attn_layer_indices": (),
    **({"embed_dropout": (0.0,)} if "exaone" in families.THERE else {}),
}  # fmt: skip
"""Keys of earlier versions, of other families or of a model's remote code, with the values that change nothing; most
also accept None, which counts as absent."""
OLDER = """
    _num_labels activation_function attention_softmax_in_fp32 bias_dropout_fusion classif_dropout directionality
    extra_pos_embeddings force_bos_token_to_be_generated head_dim inference_runner init_config intermediate_size
    layer_norm_epsilon layer_types masked_softmax_fusion max_batch_size n_ctx n_positions offset_alibi
    original_max_position_embeddings output_past pad_key_length pooler_fc_size pooler_num_attention_heads
    pooler_num_fc_layers pooler_size_per_head pooler_type pre_allocate_kv_cache rope_theta rotary_emb_base
    rotary_pct seq_length skip_bias_add scale_attention_softmax_in_fp32 skip_bias_add_qkv summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj tokenizer_name unk_token_id
    validate_runner_input verbose cache_implementation layer_switch model_max_length predict_special_tokens
    sliding_window_pattern use_parallel_embedding global_attn_every_n_layers global_rope_theta layer_norm_eps
    local_rope_theta reference_compile repad_logits_with_grad rope_local_base_freq classifier_pooling
    deterministic_flash_attn sparse_pred_ignore_index add_classification_head attention_head_dim cla_share_factor
    class_num dense_list im_end_id im_newline_id im_start_id mask_init_id norm_type org_vocab_size pad_id pool_type
    text_end_id text_start_id full_attention_interval mamba_ssm_dtype mtp_num_hidden_layers
    mtp_use_dedicated_embeddings block_dim block_ff_dim block_mlp_init_scale block_norm_eps block_out_init_scale
    block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads theta tie_embedding
    router_aux_loss_coef num_local_experts rotary_dim experts_per_token initial_context_length
    load_balance_coeff use_grouped_mm
    norm_before_gate init_method norm_eps rms_norm_eps time_step_rank mlp_expansion_factor
    global_head_dim num_global_key_value_heads altup_lr_multiplier query_pre_attn_scalar
""".split()  # noqa: SIM905
ANYWHERE = """
    _attn_implementation_autoset attn_implementation torchscript use_bfloat16 tf_legacy_loss max_sequence_length
    transformers.js_config unsloth_version unsloth_fixed sep_token_id tokenizer_class prefix task_specific_params
    finetuning_task matryoshka_dimensions
""".split()  # noqa: SIM905
ABSENT = object()


def theirs(family: str) -> PretrainedConfig:
    """Returns a family's default config, with the keys of its rotary positions as attributes."""
    config = AutoConfig.for_model(family)
    config.allow_global_per_layer_attribute_access = True  # for gemma4_text, whose layers differ
    for key, value in (getattr(config, "rope_parameters", None) or {}).items():
        if not hasattr(config, key):
            setattr(config, key, value)
    return config


def only(family: str) -> Mapping[str, tuple[Any, ...]]:
    """Returns the keys that are accepted only at values that change nothing: the family's and those of all families."""
    return {**ONLY, **LAYOUTS[family].only}


@pytest.mark.parametrize("family", families.THERE)
def test_what_is_taken_for_an_absent_key_is_what_transformers_takes(family: str) -> None:
    config = theirs(family)
    defaults = {key: value for key, value in LAYOUTS[family].defaults.items() if value is not None}
    assert defaults == {
        key: OLDER_DEFAULTS.get((family, key), getattr(config, key, ABSENT)) for key in defaults
    }


@pytest.mark.parametrize("family", families.THERE)
def test_every_key_of_a_layout_is_one_that_files_have(family: str) -> None:
    layout, config = LAYOUTS[family], theirs(family)
    keys = {*layout.defaults, *layout.harmless}
    assert {key for key in keys if not hasattr(config, key)} <= {*OLDER, *OLDER_ONLY}
    assert {key for key in only(family) if not hasattr(config, key)} <= OLDER_ONLY.keys()


@pytest.mark.parametrize("family", families.THERE)
def test_a_key_that_changes_nothing_does_so_at_its_value_in_transformers(family: str) -> None:
    config = theirs(family)
    for key, values in only(family).items():
        value = getattr(config, key, ABSENT)
        if key == "per_layer_config":  # a view without entries
            assert {} in values
        elif value is ABSENT:
            assert {*map(repr, values)} <= {*map(repr, (None, *OLDER_ONLY[key]))}, key
            assert None in values or len(values) == 1, key
        else:
            assert value in values, key


@pytest.mark.parametrize("key", OLDER_ONLY)
def test_a_key_of_earlier_versions_changes_nothing_at_these_values(key: str) -> None:
    accepted = {
        repr(value)
        for family in families.THERE
        if key in only(family) and not hasattr(theirs(family), key)
        for value in only(family)[key]
    }
    assert accepted - {"None"} == {*map(repr, OLDER_ONLY[key])}


def test_keys_that_no_family_reads_are_those_of_every_config_or_of_generation() -> None:
    known = {*dir(theirs("llama")), *dir(GenerationConfig()), *ANYWHERE}
    assert {*HARMLESS} <= known
    assert {*ANYWHERE} <= {*HARMLESS}


def test_every_causal_model_type_loads_or_has_a_reason() -> None:
    assert [name for name in families.CLASSES if not (families.loads(name) or families.missing(name))] == []
