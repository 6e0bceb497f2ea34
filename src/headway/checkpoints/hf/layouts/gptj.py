"""GPT-J (Wang and Komatsuzaki 2021), CodeGen (Nijkamp et al. 2022), which is GPT-J with its projections in one matrix,
and StableLM (Stability AI 2023), as `transformers` stores them: LayerNorm, and a part of each head rotated."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headway.checkpoints.hf.config_keys import (
    DECODER,
    OLD_GELU,
    ConfigReader,
    Inexpressible,
    Key,
    four_widths,
)
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.gpt2 import SUMMARY
from headway.checkpoints.hf.layouts.rules import Rule, TensorNames, decoder_names
from headway.checkpoints.hf.rope import PARTIAL
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.positions import Rotary

KEYS = {
    "vocab": Key("vocab_size"),
    "width": Key("n_embd"),
    "layers": Key("n_layer"),
    "heads": Key("n_head"),
    "kv_heads": Key("n_head"),
    "hidden": Key("n_inner", four_widths),
    "activation": Key("activation_function", "gelu_new", OLD_GELU),
    "trained_context": Key("n_positions", 2048),
    "dropout": Key(("resid_pdrop", "embd_pdrop"), 0.0),
    "attention_dropout": Key("attn_pdrop", 0.0),
    "norm_eps": Key("layer_norm_epsilon", 1e-5),
    "init_std": Key("initializer_range", 0.02),
    "tied": Key("tie_word_embeddings", False),
}
MODULES = {
    "input_layernorm": "ln_1",
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc_in",
    "mlp.down_proj": "mlp.fc_out",
}
PLACES = ("transformer.", "transformer.wte", "transformer.ln_f", "transformer.h.#.")
UNUSED = (".attn.bias", ".attn.masked_bias", ".attn.causal_mask")


def _read(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    dims, width, heads = given.whole("rotary_dim"), fields["width"], fields["heads"]
    if dims > width // heads or dims % 2:
        raise ConfigError(
            f"config.json: rotary_dim {dims} must be even and at most the {width // heads} dims of a head (n_embd "
            f"{width} / n_head {heads})"
        )
    return {"positions": Rotary(pairing="adjacent", dims=None if dims * heads == width else dims)}


def _write(spec: ModelSpec) -> dict[str, Any]:
    if not isinstance(spec.positions, Rotary):
        raise Inexpressible("positions")
    return {"rotary_dim": spec.positions.rotated_dims(spec.head_dim)}


GPTJ = Layout(
    family="gptj",
    architectures={"GPTJForCausalLM": "lm"},
    keys=KEYS,
    more={"rotary_dim": 64},
    only={
        "rotary": (True,),
        "scale_attn_weights": (True, None),
        "gradient_checkpointing": (False, None),
    },
    harmless=SUMMARY,
    read=_read,
    write=_write,
    pairing="adjacent",
    tensors=decoder_names(
        *PLACES,
        {**MODULES, **{f"self_attn.{part}_proj": f"attn.{part}_proj" for part in "qkv"}},
        unused=UNUSED,
    ),
)
SHARES = 4
"""Parts of the fused matrix, for the cores that CodeGen was trained on."""


def _read_codegen(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["heads"] % SHARES:
        raise ConfigError(
            f"config.json: n_head {fields['heads']} of a codegen must be a multiple of {SHARES}, the parts that its "
            "projections are stored in"
        )
    return _read(given, kind, fields)


def _in_shares(names: TensorNames) -> TensorNames:
    """Queries, values and keys of a quarter of the heads after the other."""
    parts = tuple(f"model.layers.#.self_attn.{part}_proj.weight" for part in "qvk")

    def rules(spec: ModelSpec) -> Sequence[Rule]:
        rows = (spec.heads * spec.head_dim,) * 3
        return [*names.rules(spec), Rule(parts, "transformer.h.#.attn.qkv_proj.weight", rows, SHARES)]

    return replace(names, rules=rules)


CODEGEN = replace(
    GPTJ,
    family="codegen",
    architectures={"CodeGenForCausalLM": "lm"},
    more={**GPTJ.more, "n_ctx": None},
    read=_read_codegen,
    tensors=_in_shares(decoder_names(*PLACES, MODULES, unused=UNUSED)),
)
STABLELM = Layout(
    family="stablelm",
    architectures={"StableLmForCausalLM": "lm"},
    keys={
        **DECODER,
        "kv_heads": Key("num_key_value_heads", 32),
        "activation": Key("hidden_act", "silu"),
        "order": Key("use_parallel_residual", False, {False: "pre", True: "joint"}),
        "qkv_bias": Key("use_qkv_bias"),
        "norm_eps": Key("layer_norm_eps", 1e-5),
    },
    more={"max_position_embeddings": 4096, PARTIAL: 0.25},
    only={
        "qk_layernorm": (False, None),
        "hidden_dropout": (0.0, None),  # falls on the feed-forward alone
    },
    harmless=("auto_map",),
    rope=PARTIAL,
    tensors=decoder_names(
        *("", "model.embed_tokens", "model.norm", "model.layers.#."),
        {
            name: name
            for name in (
                *("input_layernorm", "post_attention_layernorm"),
                *(f"self_attn.{part}_proj" for part in "qkvo"),
                *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
            )
        },
    ),
)
