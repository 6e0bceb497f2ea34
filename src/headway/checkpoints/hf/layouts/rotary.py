"""GPT-NeoX, Phi and StarCoder2 as `transformers` stores them: decoders with LayerNorm, rotary positions, biases, and
two matrices in the feed-forward.

GPT-NeoX, and Pythia (Black et al. 2022, section 2.1), rotate a part of each head; attention and feed-forward are
parallel, each behind its own norm. So does Phi (1, 1.5 and 2; Li et al. 2023, section 2.1), with one norm for both.
StarCoder2 (Lozhkov et al. 2024, section 5) has LLaMA's order, and rotates whole heads.
"""

from headway.checkpoints.hf.config_keys import DECODER, OLD_GELU, Key, per_head, same_heads
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.rules import decoder_names
from headway.checkpoints.hf.rope import DEFAULT_THETA, PARTIAL
from headway.checkpoints.hf.windows import from_foreign, last_keys
from headway.positions import Rotary

NORMS = {name: name for name in ("input_layernorm", "post_attention_layernorm")}
GPT_NEOX = Layout(
    family="gpt_neox",
    architectures={"GPTNeoXForCausalLM": "lm"},
    keys={
        **DECODER,
        "kv_heads": Key("num_attention_heads"),
        "order": Key("use_parallel_residual", True, {False: "pre", True: "parallel"}),
        "activation": Key("hidden_act", "gelu"),
        "qkv_bias": Key("attention_bias", True),
        "out_bias": Key("attention_bias", True),
        "dropout": Key("hidden_dropout", 0.0),
        "norm_eps": Key("layer_norm_eps", 1e-5),
    },
    more={"max_position_embeddings": 2048, "rotary_pct": 0.25, "rotary_emb_base": None},
    only={"is_decoder": (True, False, None)},
    harmless=("classifier_dropout",),
    rope="rotary_pct",
    write=lambda spec: {
        "rotary_emb_base": spec.positions.theta if isinstance(spec.positions, Rotary) else DEFAULT_THETA
    },
    tensors=decoder_names(
        *("gpt_neox.", "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "gpt_neox.layers.#."),
        {
            **NORMS,
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
            "self_attn.o_proj": "attention.dense",
            "self_attn.qkv_proj": "attention.query_key_value",
        },
        head="embed_out",
        by_group=True,
        unused=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    ),
)
PHI = Layout(
    family="phi",
    architectures={"PhiForCausalLM": "lm"},
    keys={
        **DECODER,
        "kv_heads": Key("num_key_value_heads", same_heads),
        "activation": Key("hidden_act", "gelu_new", OLD_GELU),
        "dropout": Key(("resid_pdrop", "embd_pdrop"), 0.0),
        "norm_eps": Key("layer_norm_eps", 1e-5),
    },
    more={"max_position_embeddings": 2048, PARTIAL: 0.5},
    only={"qk_layernorm": (False, None)},
    rope=PARTIAL,
    tensors=decoder_names(
        *("", "model.embed_tokens", "model.final_layernorm", "model.layers.#."),
        {
            **{f"self_attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
            "self_attn.o_proj": "self_attn.dense",
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
            "input_layernorm": "input_layernorm",
        },
    ),
)
STARCODER2 = Layout(
    family="starcoder2",
    architectures={"Starcoder2ForCausalLM": "lm"},
    keys={
        **DECODER,
        "kv_heads": Key("num_key_value_heads", 2),
        "head_dim": Key("head_dim", per_head),
        "activation": Key("hidden_act", "gelu_pytorch_tanh"),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), Key("use_bias", True)),
        "dropout": Key(("residual_dropout", "embedding_dropout"), 0.0),
        "norm_eps": Key("norm_epsilon", 1e-5),
        "init_std": Key("initializer_range", 0.018042),
        "tied": Key("tie_word_embeddings", True),
    },
    more={"max_position_embeddings": 4096, "sliding_window": None},
    only={
        "mlp_type": ("default", None),
        "norm_type": ("layer_norm", None),
        "scale_attn_weights": (True, None),
    },
    # names of GPTBigCode that its files still have: hidden_act and norm_epsilon are what counts
    harmless=(
        "activation_function",
        "layer_norm_epsilon",
        "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",
    ),
    rope="",
    read=lambda given, kind, fields: {
        "patterns": from_foreign("sliding_window", given.get("sliding_window"))
    },
    write=lambda spec: {"sliding_window": last_keys(spec.patterns[0])},
    tensors=decoder_names(
        *("", "model.embed_tokens", "model.norm", "model.layers.#."),
        {
            **NORMS,
            **{f"self_attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"},
            "mlp.up_proj": "mlp.c_fc",
            "mlp.down_proj": "mlp.c_proj",
        },
    ),
)
