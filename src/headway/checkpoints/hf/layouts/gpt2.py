"""GPT-2 and related decoders as `transformers` stores them (Radford et al. 2019): matrices are [in, out], with queries,
keys and values in one.

GPT (Radford et al. 2018) has post-norms. GPTBigCode has one key and value head (Ben Allal et al. 2023, section 4; Li et
al. 2023, section 4: SantaCoder, StarCoder), and matrices [out, in], as all that follow. GPT-Neo (Black et al. 2021) has
a window in every other layer, and unscaled scores; GPT-J (Wang and Komatsuzaki 2021) rotates a part of each head, and
so does CodeGen (Nijkamp et al. 2022), which stores queries, values and keys in one matrix; CTRL (Keskar et al. 2019)
adds sines and cosines.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from headway.checkpoints.hf.config_keys import (
    FOUR_WIDTHS,
    OLD_GELU,
    SIZES,
    ConfigReader,
    Inexpressible,
    Key,
    called,
    four_widths,
    without,
)
from headway.checkpoints.hf.harmless import words
from headway.checkpoints.hf.layouts.base import Layout, Part
from headway.checkpoints.hf.layouts.parts import learned
from headway.checkpoints.hf.layouts.rules import Rule, TensorNames, block, decoder_names
from headway.checkpoints.hf.windows import SLIDING, from_foreign, window_keys
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.patterns import Causal
from headway.positions import Rotary

KEYS = {
    **called(SIZES, width="n_embd", layers="n_layer", heads="n_head"),
    "hidden": Key("n_inner", four_widths),
    "activation": Key("activation_function", "gelu_new", OLD_GELU),
    "dropout": Key(("resid_pdrop", "embd_pdrop"), 0.1),
    "attention_dropout": Key("attn_pdrop", 0.1),
    "attention_scale": Key("scale_attn_weights", True, {True: None, False: 1.0}),
    "norm_eps": Key("layer_norm_epsilon", 1e-5),
    "tied": Key("tie_word_embeddings", True),
}
ONLY = {
    "scale_attn_by_inverse_layer_idx": (False, None),
    # the order of two operations in mixed-precision training; without rounding the result is the same
    "reorder_and_upcast_attn": (False, True, None),
}
SUMMARY = words(
    "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout"
)
"""Keys of GPT2DoubleHeadsModel, which no language model reads."""


def _check_rows(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("n_ctx") not in (None, size := fields["trained_context"]):
        raise ConfigError(
            f"config.json: n_ctx is {config.get('n_ctx')}, but the table of positions has n_positions {size} rows; "
            "transformers reads n_positions only: remove n_ctx, or make them equal"
        )
    return {}


ROWS = Part({"n_ctx": None}, _check_rows)
_names = partial(decoder_names, "transformer.", "transformer.wte", "transformer.ln_f", "transformer.h.#.")
"""Names that most families here share; how a layer's matrices are stored differs."""
_learned = partial(_names, top={"model.embed_positions": "transformer.wpe"})
MODULES = block("ln_1 ln_2", "attn. c_attn c_proj", "mlp. c_fc c_proj")
MASKS = (".attn.bias", ".attn.masked_bias")
GPT2 = Layout(
    family="gpt2",
    architectures={"GPT2LMHeadModel": "lm"},
    keys=KEYS,
    only=ONLY,
    harmless=SUMMARY,
    parts=(learned(1024, "n_positions"), ROWS),
    tensors=_learned(MODULES, transposed=True, unused=MASKS),
)
GPT1 = Layout(
    family="openai-gpt",
    architectures={"OpenAIGPTLMHeadModel": "lm"},
    keys={
        **without(KEYS, "attention_scale"),
        "hidden": FOUR_WIDTHS,
        "activation": Key("afn", "gelu", {"gelu": "gelu_pytorch_tanh"}),
    },
    only={"n_special": (0,)},
    harmless=(*SUMMARY, "predict_special_tokens"),
    parts=(learned(512, "n_positions"), ROWS),
    tensors=decoder_names(
        *("transformer.", "transformer.tokens_embed", "", "transformer.h.#.", MODULES),
        top={"model.embed_positions": "transformer.positions_embed"},
        transposed=True,
        unused=(".attn.bias", "position_ids"),
    ),
)


def _read_queries(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    kv_heads = 1 if config.flag("multi_query") else fields["heads"]
    if config.get("num_key_value_heads") not in (None, kv_heads):
        raise ConfigError(
            f"config.json: num_key_value_heads is {config.get('num_key_value_heads')}, but multi_query "
            f"{config.flag('multi_query')} means {kv_heads}, which transformers uses; remove num_key_value_heads"
        )
    return {"kv_heads": kv_heads}


GPT_BIGCODE = Layout(
    family="gpt_bigcode",
    architectures={"GPTBigCodeForCausalLM": "lm"},
    keys={**KEYS, "activation": Key("activation_function", "gelu_pytorch_tanh")},
    # the dtype of the softmax, which is always float32 or wider here
    only={
        **ONLY,
        **dict.fromkeys(("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"), (True, False)),
    },
    # how BigCode's own program ran them
    harmless=SUMMARY
    + words("inference_runner validate_runner_input pre_allocate_kv_cache max_batch_size pad_key_length"),
    parts=(
        *GPT2.parts,
        Part(
            {"num_key_value_heads": None, "multi_query": True},
            _read_queries,
            lambda spec: {"multi_query": spec.kv_heads == 1},
        ),
    ),
    tensors=_learned(MODULES, by_group=True, unused=MASKS),
)
KINDS = ("global", "local")


def _read_kinds(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    groups, layers = config.need("attention_types"), fields["layers"]
    kinds: list[str] = []
    # a value of another structure leaves `kinds` empty, and is refused below
    with suppress(TypeError, ValueError):
        if sum(len(names) * max(times, 0) for names, times in groups) == layers:
            kinds = [name for names, times in groups for name in names * times if name in KINDS]
    if len(kinds) != layers:
        raise config.wrong("attention_types", f'like [[["global", "local"], 12]], of {layers} layers', groups)
    if config.get("attention_layers") not in (None, kinds):
        raise ConfigError(
            f"config.json: attention_layers {config.get('attention_layers')} differs from attention_types, which "
            "transformers reads; remove attention_layers"
        )
    window = from_foreign("sliding_window", config.need("window_size"))
    return {"patterns": [window if kind == "local" else Causal() for kind in kinds]}


def _write_kinds(spec: ModelSpec) -> dict[str, Any]:
    keys = window_keys(spec, 256)
    kinds = [KINDS[kind == SLIDING] for kind in keys["layer_types"]]
    return {
        "attention_types": [[kinds, 1]],
        "attention_layers": kinds,
        "window_size": keys["sliding_window"],
    }


GPT_NEO = Layout(
    family="gpt_neo",
    architectures={"GPTNeoForCausalLM": "lm"},
    keys={
        **called(SIZES, layers="num_layers", heads="num_heads"),
        "hidden": Key("intermediate_size", four_widths),
        "activation": KEYS["activation"],
        "dropout": Key(("resid_dropout", "embed_dropout"), 0.0),
        "attention_dropout": Key("attention_dropout", 0.0),
        "norm_eps": Key("layer_norm_epsilon", 1e-5),
        "tied": KEYS["tied"],
    },
    harmless=(*SUMMARY, "classifier_dropout"),
    parts=(
        learned(2048),
        Part(
            {"attention_types": None, "attention_layers": None, "window_size": 256}, _read_kinds, _write_kinds
        ),
    ),
    tensors=_learned(
        block("ln_1 ln_2", "attn.attention. q_proj k_proj v_proj out_proj", "mlp. c_fc c_proj"),
        unused=(".attn.attention.bias", ".attn.attention.masked_bias"),
    ),
)


def _read_rotary(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    dims, width, heads = config.whole("rotary_dim"), fields["width"], fields["heads"]
    if dims > width // heads or dims % 2:
        raise ConfigError(
            f"config.json: rotary_dim {dims} must be even and at most the {width // heads} dims of a head (n_embd "
            f"{width} / n_head {heads})"
        )
    return {"positions": Rotary(pairing="adjacent", dims=None if dims * heads == width else dims)}


def _write_rotary(spec: ModelSpec) -> dict[str, Any]:
    if not isinstance(spec.positions, Rotary):
        raise Inexpressible("positions")
    return {"rotary_dim": spec.positions.rotated_dims(spec.head_dim)}


GPTJ_MASKS = (*MASKS, ".attn.causal_mask")
GPTJ = Layout(
    family="gptj",
    architectures={"GPTJForCausalLM": "lm"},
    keys={
        **without(KEYS, "attention_scale"),
        "trained_context": Key("n_positions", 2048),
        "dropout": Key(("resid_pdrop", "embd_pdrop"), 0.0),
        "attention_dropout": Key("attn_pdrop", 0.0),
        "tied": Key("tie_word_embeddings"),
    },
    only={"rotary": (True,), "scale_attn_weights": (True, None)},
    harmless=SUMMARY,
    parts=(Part({"rotary_dim": 64}, _read_rotary, _write_rotary),),
    pairing="adjacent",
    tensors=_names(
        block("ln_1", "attn. q_proj k_proj v_proj out_proj", "mlp. fc_in fc_out"), unused=GPTJ_MASKS
    ),
)
SHARES = 4
"""Number of parts in which the fused matrix is stored, one for each TPU core that CodeGen was trained on."""


def _check_shares(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["heads"] % SHARES:
        raise ConfigError(
            f"config.json: n_head of a codegen must be a multiple of {SHARES}, the number of parts of its fused qkv "
            f"projection; got {fields['heads']}"
        )
    return {}


def _in_shares(names: TensorNames) -> TensorNames:
    """Adds rules for one fused matrix: queries, values and keys of a quarter of the heads, then of the next, ..."""
    parts = tuple(f"model.layers.#.self_attn.{part}_proj.weight" for part in "qvk")

    def rules(spec: ModelSpec) -> Sequence[Rule]:
        rows = (spec.heads * spec.head_dim,) * 3
        return [*names.rules(spec), Rule(parts, "transformer.h.#.attn.qkv_proj.weight", rows, SHARES)]

    return replace(names, rules=rules)


CODEGEN = replace(
    GPTJ,
    family="codegen",
    architectures={"CodeGenForCausalLM": "lm"},
    parts=(Part({"n_ctx": None}, _check_shares), *GPTJ.parts),
    tensors=_in_shares(
        _names(block("ln_1", "attn. out_proj", "mlp. fc_in fc_out"), unused=GPTJ_MASKS),
    ),
)
CTRL = Layout(
    family="ctrl",
    architectures={"CTRLLMHeadModel": "lm"},
    keys={
        **without(KEYS, "activation", "attention_dropout", "attention_scale", "norm_eps"),
        "hidden": Key("dff"),
        "trained_context": Key("n_positions", 256),
        "max_context": Key((), lambda fields: fields["trained_context"]),
    },
    # its layers ignore these keys
    only={"layer_norm_epsilon": (1e-6, None), "attn_pdrop": (0.0, 0.1, None)},
    harmless=("n_ctx", *SUMMARY),
    tensors=decoder_names(
        *("transformer.", "transformer.w", "transformer.layernorm", "transformer.h.#."),
        block("layernorm1 layernorm2", "multi_head_attention. Wq Wk Wv dense", "ffn. 0 2"),
    ),
)
