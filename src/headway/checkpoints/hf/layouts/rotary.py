"""Decoders with rotary positions and older norms or activations, as `transformers` stores them.

With LayerNorm: GPT-NeoX, and Pythia (Black et al. 2022, section 2.1), rotate a part of each head; attention and
feed-forward are parallel, each after its own norm. Phi (1, 1.5 and 2; Li et al. 2023, section 2.1) does the same with
one norm for both. StarCoder2 (Lozhkov et al. 2024, section 5) has LLaMA's order, and rotates whole heads; StableLM
(Stability AI 2023) also has LLaMA's gate, and rotates a quarter.

With squared ReLU, and without a gate: Arcee AFM (2025) is LLaMA otherwise; Nemotron (Parmar et al. 2024) and Jais 2
(2025) have LayerNorm, in Nemotron multiplied by 1 + w; Persimmon (Adept 2023) also has it on queries and keys. nanochat
(Karpathy 2025) has norms without weights, also after the embedding and on queries and keys after their rotation, and
capped logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from headway.checkpoints.hf.config_keys import DECODER, OLD_GELU, ConfigReader, Key, same_heads
from headway.checkpoints.hf.harmless import words
from headway.checkpoints.hf.layouts.base import Layout, Part
from headway.checkpoints.hf.layouts.llama import BIAS, FREE, MLP_BIAS, block_names, llama_layout
from headway.checkpoints.hf.layouts.rules import Change, Rule, block, decoder_names
from headway.checkpoints.hf.layouts.tensors import renamed
from headway.checkpoints.hf.rope import DEFAULT_THETA, PARTIAL
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.positions import Rotary

EPS = {"norm_eps": Key("layer_norm_eps", 1e-5)}
GPT_NEOX = Layout(
    family="gpt_neox",
    architectures={"GPTNeoXForCausalLM": "lm"},
    keys={
        **DECODER,
        **EPS,
        "order": Key("use_parallel_residual", True, {False: "pre", True: "parallel"}),
        "activation": Key("hidden_act", "gelu"),
        **dict.fromkeys(("qkv_bias", "out_bias"), Key("attention_bias", True)),
        "dropout": Key("hidden_dropout", 0.0),
    },
    more={"max_position_embeddings": 2048, "rotary_pct": 0.25},
    only={"is_decoder": (True, False, None)},
    harmless=("classifier_dropout",),
    rope="rotary_pct",
    parts=(
        Part(
            {"rotary_emb_base": None},  # `read_rope` reads it
            write=lambda spec: {
                "rotary_emb_base": spec.positions.theta
                if isinstance(spec.positions, Rotary)
                else DEFAULT_THETA
            },
        ),
    ),
    tensors=decoder_names(
        *("gpt_neox.", "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "gpt_neox.layers.#."),
        block(
            "input_layernorm post_attention_layernorm",
            "attention. query_key_value dense",
            "mlp. dense_h_to_4h dense_4h_to_h",
        ),
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
        **EPS,
        "kv_heads": Key("num_key_value_heads", same_heads),
        "activation": Key("hidden_act", "gelu_new", OLD_GELU),
        "dropout": Key(("resid_pdrop", "embd_pdrop"), 0.0),
    },
    more={"max_position_embeddings": 2048, PARTIAL: 0.5},
    only={"qk_layernorm": (False, None)},
    rope=PARTIAL,
    tensors=decoder_names(
        *("", "model.embed_tokens", "model.final_layernorm", "model.layers.#."),
        block("input_layernorm", "self_attn. q_proj k_proj v_proj dense", "mlp. fc1 fc2"),
    ),
)
STARCODER2 = llama_layout(
    *("starcoder2", "Starcoder2ForCausalLM", "all", 4096),
    {
        "activation": Key("hidden_act", "gelu_pytorch_tanh"),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), Key("use_bias", True)),
        "dropout": Key(("residual_dropout", "embedding_dropout"), 0.0),
        "norm_eps": Key("norm_epsilon", 1e-5),
        "init_std": Key("initializer_range", 0.018042),
        "tied": Key("tie_word_embeddings", True),
    },
    kv_heads=2,
    more={"sliding_window": None},
    only={
        "mlp_type": ("default", None),
        "norm_type": ("layer_norm", None),
        "scale_attn_weights": (True, None),
    },
    # names of GPTBigCode that its files still have: transformers reads hidden_act and norm_epsilon
    harmless=words(
        "activation_function layer_norm_epsilon attention_softmax_in_fp32 scale_attention_softmax_in_fp32"
    ),
    tensors=renamed({".up_proj.": ".c_fc.", ".down_proj.": ".c_proj."}),
)
STABLELM = llama_layout(
    *("stablelm", "StableLmForCausalLM", "none", 4096),
    {
        **EPS,
        "order": Key("use_parallel_residual", False, {False: "pre", True: "joint"}),
        "qkv_bias": Key("use_qkv_bias"),
    },
    kv_heads=32,
    without=("head_dim",),
    more={PARTIAL: 0.25},
    # hidden_dropout applies only to the feed-forward
    only={"qk_layernorm": (False, None), "hidden_dropout": (0.0, None)},
    harmless=("auto_map",),
    rope=PARTIAL,
)


RELU2 = {"activation": Key("hidden_act", "relu2")}
LAYER_NORM = {**RELU2, "norm_eps": Key("layer_norm_eps", 1e-5)}
NORMS = "input_layernorm post_attention_layernorm"
ARCEE = llama_layout(
    *("arcee", "ArceeForCausalLM", "none", 4096),
    {**RELU2, **BIAS, **MLP_BIAS, "norm_eps": Key("rms_norm_eps", 1e-5)},
    heads_divide=True,
)
NEMOTRON = llama_layout(
    *("nemotron", "NemotronForCausalLM", "none", 4096),
    {
        **RELU2,
        **BIAS,
        **MLP_BIAS,
        "norm_eps": Key("norm_eps", 1e-5),
        "init_std": Key("initializer_range", 0.0134),
    },
    more={PARTIAL: 0.5},
    rope=PARTIAL,
)
JAIS2 = llama_layout(
    *("jais2", "Jais2ForCausalLM", "none", 8192),
    {**LAYER_NORM, **{field: key._replace(default=True) for field, key in {**BIAS, **MLP_BIAS}.items()}},
    heads_divide=True,
)
PERSIMMON = llama_layout(
    *("persimmon", "PersimmonForCausalLM", "none", 16384),
    {**LAYER_NORM, "qk_norm": Key("qk_layernorm", True, {True: "head", False: "none"})},
    without=("head_dim", "kv_heads"),
    heads_divide=True,
    more={PARTIAL: 0.5},
    only={"hidden_dropout": (0.0, None)},  # applies to one of two sub-layers, and ours to both
    rope=PARTIAL,
    tensors=decoder_names(
        *("", "model.embed_tokens", "model.final_layernorm", "model.layers.#."),
        {
            **block(NORMS, "self_attn. query_key_value dense", "mlp. dense_h_to_4h dense_4h_to_h"),
            "self_attn.q_norm": "self_attn.q_layernorm",
            "self_attn.k_norm": "self_attn.k_layernorm",
        },
        by_group=True,
    ),
)
NAMES = block_names(block("", "self_attn. q_proj k_proj v_proj o_proj", "mlp. fc1 fc2"))


def _turned(spec: ModelSpec) -> Sequence[Rule]:
    """Returns rules that swap the halves of queries and keys: then their rotation, by minus the angle, equals ours."""
    heads = {"q_proj": spec.heads, "k_proj": spec.kv_heads}
    of_rules = ((rule, heads.get(rule.ours[0].split(".")[-2])) for rule in NAMES.rules(spec))
    return [replace(rule, changes=(_swapped(count),)) if count else rule for rule, count in of_rules]


def _swapped(heads: int) -> Change:
    """Returns a change that swaps the halves of each head."""

    def turn(x: Tensor) -> Tensor:
        halves: Tensor = x.unflatten(0, (heads, 2, -1))
        return halves.flip(1).flatten(0, 2)

    return Change(turn, turn, rows=True)


def _check_nanochat(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    if (factor := fields["positions"].amplitude) != 1:
        raise ConfigError(
            f"config.json: rope_parameters of a nanochat scale queries and keys by {factor:g} before their norms, "
            "which undo it; choose a rope_type without an attention factor"
        )
    return {}


NANOCHAT = llama_layout(
    *("nanochat", "NanoChatForCausalLM", "none", 2048),
    {
        **RELU2,
        **BIAS,
        "norm_eps": Key("rms_norm_eps", 1e-6),
        "logit_cap": Key("final_logit_softcapping", 15.0),
    },
    head_dim=FREE,
    parts=(Part(read=_check_nanochat),),
    tensors=replace(NAMES, rules=_turned),
)
