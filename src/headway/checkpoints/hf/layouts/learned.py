"""Decoders with a trained table of positions, as `transformers` stores them: GPT (Radford et al. 2018), whose norms
stand behind; GPT-Neo (Black et al. 2021), with a window in every other layer, and scores that are not scaled; OPT
(Zhang et al. 2022) and BioGPT (Luo et al. 2022), whose tables begin at row 2."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from headway.checkpoints.hf.config_keys import SIZES, ConfigReader, Inexpressible, Key, four_widths
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.gpt2 import GPT2, MODULES, SUMMARY
from headway.checkpoints.hf.layouts.rules import decoder_names
from headway.checkpoints.hf.windows import from_foreign, last_keys
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.patterns import Causal
from headway.positions import Learned

GPT1 = replace(
    GPT2,
    family="openai-gpt",
    architectures={"OpenAIGPTLMHeadModel": "lm"},
    keys={
        **{field: key for field, key in GPT2.keys.items() if field not in ("hidden", "attention_scale")},
        "activation": Key("afn", "gelu", {"gelu": "gelu_pytorch_tanh"}),
    },
    more={**GPT2.more, "n_positions": 512},
    only={"gradient_checkpointing": (False, None), "n_special": (0,)},
    harmless=(*SUMMARY, "predict_special_tokens"),
    read=lambda given, kind, fields: {**GPT2.read(given, kind, fields), "hidden": four_widths(fields)},
    tensors=decoder_names(
        *("transformer.", "transformer.tokens_embed", "", "transformer.h.#.", MODULES),
        top={"model.embed_positions": "transformer.positions_embed"},
        transposed=True,
        unused=(".attn.bias", "position_ids"),
    ),
)
KINDS = ("global", "local")


def _read_neo(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    groups, layers = given.need("attention_types"), fields["layers"]
    kinds: list[str] = []
    with suppress(TypeError, ValueError):  # what is no such list says nothing
        if sum(len(names) * max(times, 0) for names, times in groups) == layers:
            kinds = [name for names, times in groups for name in names * times if name in KINDS]
    if len(kinds) != layers:
        raise given.wrong("attention_types", f'like [[["global", "local"], 12]], of {layers} layers', groups)
    if given.get("attention_layers") not in (None, kinds):
        raise ConfigError(
            f"config.json: attention_layers {given.get('attention_layers')} are not those of attention_types, which "
            "is what transformers reads: remove them"
        )
    window, size = (
        from_foreign("sliding_window", given.need("window_size")),
        given.whole("max_position_embeddings"),
    )
    return {
        "patterns": [window if one == "local" else Causal() for one in kinds],
        "positions": Learned(size),
        "trained_context": size,
    }


def _write_neo(spec: ModelSpec) -> dict[str, Any]:
    each = [last_keys(pattern) for pattern in spec.patterns]
    sizes = {size for size in each if size is not None}
    if len(sizes) > 1:
        raise Inexpressible("windows")
    kinds = [KINDS[size is not None] for size in each]
    return {
        "attention_types": [[kinds, 1]],
        "attention_layers": kinds,
        "window_size": sizes.pop() if sizes else 256,
        "max_position_embeddings": spec.context_limit or spec.trained_context,
    }


GPT_NEO = Layout(
    family="gpt_neo",
    architectures={"GPTNeoForCausalLM": "lm"},
    keys={
        **SIZES,
        "layers": Key("num_layers"),
        "heads": Key("num_heads"),
        "kv_heads": Key("num_heads"),
        "hidden": Key("intermediate_size", four_widths),
        "activation": GPT2.keys["activation"],
        "dropout": Key(("resid_dropout", "embed_dropout"), 0.0),
        "attention_dropout": Key("attention_dropout", 0.0),
        "norm_eps": Key("layer_norm_epsilon", 1e-5),
        "tied": Key("tie_word_embeddings", True),
    },
    more={
        **dict.fromkeys(("attention_types", "attention_layers")),
        "window_size": 256,
        "max_position_embeddings": 2048,
    },
    only={"gradient_checkpointing": (False, None)},
    harmless=(*SUMMARY, "classifier_dropout"),
    read=_read_neo,
    write=_write_neo,
    tensors=decoder_names(
        *("transformer.", "transformer.wte", "transformer.ln_f", "transformer.h.#."),
        {
            **{f"self_attn.{part}_proj": f"attn.attention.{part}_proj" for part in "qkv"},
            "self_attn.o_proj": "attn.attention.out_proj",
            **{ours: theirs for ours, theirs in MODULES.items() if not ours.startswith("self_attn.")},
        },
        top={"model.embed_positions": "transformer.wpe"},
        unused=(".attn.attention.bias", ".attn.attention.masked_bias"),
    ),
)
FAIRSEQ = {
    **{f"self_attn.{part}_proj": f"self_attn.{part}_proj" for part in "qkv"},
    "self_attn.o_proj": "self_attn.out_proj",
    "input_layernorm": "self_attn_layer_norm",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
    "post_attention_layernorm": "final_layer_norm",
}


def _table(given: ConfigReader) -> dict[str, Any]:
    size = given.whole("max_position_embeddings")
    return {"positions": Learned(size, offset=2), "trained_context": size}


def _read_opt(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    width = fields["width"]
    if given.get("word_embed_proj_dim") not in (None, width):
        raise ConfigError(
            f"config.json: word_embed_proj_dim {given.get('word_embed_proj_dim')} is not hidden_size {width}: a "
            "decoder whose embedding has other columns than its states is unsupported"
        )
    last = fields["order"] == "pre" and not given.flag("_remove_final_layer_norm")
    return {**_table(given), "final_norm": last}


def _write_opt(spec: ModelSpec) -> dict[str, Any]:
    return {
        "max_position_embeddings": spec.context_limit or spec.trained_context,
        "word_embed_proj_dim": spec.width,
        "_remove_final_layer_norm": spec.order == "pre" and not spec.final_norm,
    }


OPT = Layout(
    family="opt",
    architectures={"OPTForCausalLM": "lm"},
    keys={
        **SIZES,
        "kv_heads": Key("num_attention_heads"),
        "hidden": Key("ffn_dim"),
        "order": Key("do_layer_norm_before", True, {True: "pre", False: "post"}),
        "activation": Key("activation_function", "relu"),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), Key("enable_bias", True)),
        "dropout": Key("dropout", 0.1),
        "attention_dropout": Key("attention_dropout", 0.0),
        "init_std": Key("init_std", 0.02),
        "tied": Key("tie_word_embeddings", True),
    },
    more={
        "max_position_embeddings": 2048,
        **dict.fromkeys(("word_embed_proj_dim", "_remove_final_layer_norm")),
    },
    only={
        "layer_norm_elementwise_affine": (True, None),
        "layerdrop": (0.0, None),
        "activation_dropout": (0.0, None),
    },
    read=_read_opt,
    write=_write_opt,
    tensors=decoder_names(
        *(
            "model.",
            "model.decoder.embed_tokens",
            "model.decoder.final_layer_norm",
            "model.decoder.layers.#.",
        ),
        FAIRSEQ,
        top={"model.embed_positions": "model.decoder.embed_positions"},
    ),
)
BIOGPT = Layout(
    family="biogpt",
    architectures={"BioGptForCausalLM": "lm"},
    keys={
        **SIZES,
        "kv_heads": Key("num_attention_heads"),
        "activation": Key("hidden_act", "gelu"),
        "dropout": Key("hidden_dropout_prob", 0.1),
        "attention_dropout": Key("attention_probs_dropout_prob", 0.1),
        "activation_dropout": Key("activation_dropout", 0.0),
        "tied": Key("tie_word_embeddings", True),
    },
    more={"max_position_embeddings": 1024, "scale_embedding": True},
    only={"layerdrop": (0.0, None)},
    harmless=("layer_norm_eps",),  # its norms have 1e-5, whatever it says
    read=lambda given, kind, fields: {
        **_table(given),
        "embedding_scale": fields["width"] ** 0.5 if given.flag("scale_embedding") else 1.0,
    },
    write=lambda spec: {
        "max_position_embeddings": spec.context_limit or spec.trained_context,
        "scale_embedding": spec.embedding_scale != 1.0,
    },
    tensors=decoder_names(
        *("biogpt.", "biogpt.embed_tokens", "biogpt.layer_norm", "biogpt.layers.#.", FAIRSEQ),
        top={"model.embed_positions": "biogpt.embed_positions"},
        head="output_projection",
        output="output_projection",
    ),
)
