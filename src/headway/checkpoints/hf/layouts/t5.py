"""T5 as `transformers` stores it (Raffel et al. 2019): versions 1.0, 1.1 and Flan; and mT5 (Xue et al. 2020), which is
1.1 under another name.

Version 1.0 ties the output layer to the embedding, and scales its input by M^-0.5; the later ones do neither.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader, FieldMap, Key
from headway.checkpoints.hf.layouts.base import Layout, Part
from headway.checkpoints.hf.layouts.rules import Rule, TensorNames, module_rules, same, within
from headway.errors import ConfigError, check_known
from headway.models import ModelSpec
from headway.positions import T5Bias

PROJECTIONS = {"relu": ("relu", False), "gelu": ("gelu", False), "gelu_new": ("gelu_pytorch_tanh", False),
               "silu": ("silu", False), "gated-gelu": ("gelu_pytorch_tanh", True), "gated-relu": ("relu", True),
               "gated-silu": ("silu", True)}  # fmt: skip
ATTENTION = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}
KEYS: FieldMap = {
    "vocab": Key("vocab_size"),
    "width": Key("d_model"),
    "heads": Key("num_heads"),
    "head_dim": Key("d_kv"),
    "hidden": Key("d_ff"),
    "norm_eps": Key("layer_norm_epsilon", 1e-6),
    "trained_context": Key("n_positions", 512),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), Key("dropout_rate", 0.1)),
}
MORE = {
    **dict.fromkeys(("num_decoder_layers", "is_gated_act", "dense_act_fn")),
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "initializer_factor": 1.0,
    "feed_forward_proj": "relu",
    "tie_word_embeddings": True,
}
UNIT = 0.02  # init_std if initializer_factor is 1


def _read(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    act, gated = _projection(config)
    tied = config.flag("tie_word_embeddings")
    scaled = tied if config.get("scale_decoder_outputs") is None else config.flag("scale_decoder_outputs")
    sizes = ("relative_attention_num_buckets", "relative_attention_max_distance")
    return {
        "layers": config.whole("num_decoder_layers", config.whole("num_layers")),
        "positions": T5Bias(*map(config.whole, sizes)),
        "activation": act,
        "gated": gated,
        # newer versions of transformers always write "tied", even if the file has a separate output layer
        "tied": tied and scaled,
        "logit_scale": fields["width"] ** -0.5 if scaled else 1.0,
        "init_std": round(config.number("initializer_factor") * UNIT, 12),
    }


def _projection(config: ConfigReader) -> tuple[str, bool]:
    """Returns the activation and whether it gates. Raises ConfigError if it is unknown or other keys contradict it."""
    projection = config.text("feed_forward_proj")
    check_known(projection, PROJECTIONS, 'config.json: "feed_forward_proj" is', are="known are")
    act = "gelu_new" if projection == "gated-gelu" else projection.removeprefix("gated-")
    for key, value in (("is_gated_act", PROJECTIONS[projection][1]), ("dense_act_fn", act)):
        if config.get(key) not in (None, value):
            raise ConfigError(
                f'config.json: "{key}" is {config.get(key)!r}, but "feed_forward_proj" {projection!r} means {value!r}'
            )
    return PROJECTIONS[projection]


def _write(spec: ModelSpec) -> dict[str, Any]:
    bias = spec.positions if isinstance(spec.positions, T5Bias) else T5Bias()
    names = {value: key for key, value in PROJECTIONS.items()}
    return {
        "num_decoder_layers": spec.layers,
        "relative_attention_num_buckets": bias.buckets,
        "relative_attention_max_distance": bias.max_distance,
        "initializer_factor": round(spec.init_std / UNIT, 12),
        "feed_forward_proj": names.get((spec.activation, spec.gated), "relu"),
        "tie_word_embeddings": spec.tied,
    }


def _rules(spec: ModelSpec) -> Sequence[Rule]:
    assert spec.encoder is not None
    rules = module_rules(spec, {"decoder.embed_tokens": "shared", "lm_head": "lm_head"})
    for side, stack in (("encoder", spec.encoder), ("decoder", spec)):
        first = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        modules = within(f"{side}.layers.#.", f"{side}.block.#.layer.", _layer(stack))
        rules += [same(f"{side}.scores.0_0", first)]
        rules += module_rules(spec, {f"{side}.norm": f"{side}.final_layer_norm", **modules})
    return rules


def _layer(spec: ModelSpec) -> dict[str, str]:
    """Returns the modules of a layer: theirs are numbered sub-layers, of which the feed-forward is the last."""
    last = 1 if spec.encoder is None else 2
    up = {"gate_proj": "wi_0", "up_proj": "wi_1"} if spec.gated else {"up_proj": "wi"}
    return {
        **within("mlp.", f"{last}.DenseReluDense.", {**up, "down_proj": "wo"}),
        "post_attention_layernorm": f"{last}.layer_norm",
        **within("self_attn.", "0.SelfAttention.", ATTENTION),
        "input_layernorm": "0.layer_norm",
        **within("cross_attn.", "1.EncDecAttention.", ATTENTION),
        "cross_attention_layernorm": "1.layer_norm",
    }


def _aliases(spec: ModelSpec) -> Mapping[str, str]:
    second = ("encoder.embed_tokens", "decoder.embed_tokens", *(("lm_head",) if spec.tied else ()))
    return {f"{name}.weight": "shared.weight" for name in second}


TENSORS = TensorNames(
    rules=_rules,
    aliases=_aliases,
    outputs={"lm": "lm_head"},
    stand_in={"lm_head.weight": "shared.weight"},
    # in old files, and used by no layer
    unused=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
)
T5 = Layout(
    family="t5",
    architectures={"T5ForConditionalGeneration": "lm", "T5WithLMHeadModel": "lm"},
    keys=KEYS,
    encoder_keys={"layers": Key("num_layers")},
    only={"is_decoder": (False, None)},
    harmless=("classifier_dropout", "output_past"),
    parts=(
        Part(
            {**MORE, "scale_decoder_outputs": None},
            _read,
            lambda spec: {**_write(spec), "scale_decoder_outputs": spec.logit_scale != 1.0},
        ),
    ),
    tensors=TENSORS,
)
MT5 = replace(
    T5,
    family="mt5",
    architectures={"MT5ForConditionalGeneration": "lm"},
    parts=(
        Part(
            {**MORE, "feed_forward_proj": "gated-gelu"},
            # tie_word_embeddings of folders is ignored: files have a separate output layer
            lambda config, fields: {**_read(config, fields), "tied": False, "logit_scale": 1.0},
            _write,
        ),
    ),
)
