"""Falcon-H1 as `transformers` stores it (Falcon team 2025): LLaMA with state-space duality (SSD) in parallel with
attention in every layer, and multipliers of inputs or outputs of almost every matrix.

Some multipliers have an equivalent here: queries and keys times a, and keys times k, are a factor a^2 k of scores;
values times a are a factor of the attention output."""

from collections.abc import Mapping
from math import inf, nextafter
from typing import Any

from headway.attention.delta import SSDSpec
from headway.checkpoints.hf.config_keys import ConfigReader, Inexpressible, Key
from headway.checkpoints.hf.layouts.base import Part
from headway.checkpoints.hf.layouts.experts import LAYER
from headway.checkpoints.hf.layouts.hybrids import MIXER, by_mixer, check_silu
from headway.checkpoints.hf.layouts.llama import BIAS, MLP_BIAS, llama_layout
from headway.checkpoints.hf.layouts.rules import Rule
from headway.checkpoints.hf.layouts.ssd import BAMBA_NAMES, STEPS, ssd_rules
from headway.checkpoints.hf.layouts.tensors import renamed
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.models.mixers import Softmax
from headway.patterns import Causal

SIZES = {
    "heads": "mamba_n_heads",
    "key_heads": "mamba_n_groups",
    "head_dim": "mamba_d_state",
    "value_dim": "mamba_d_head",
    "conv": "mamba_d_conv",
}
FLAGS = {"conv_bias": "mamba_conv_bias", "bias": "mamba_proj_bias", "norm": "mamba_rms_norm"}
INNER, AUTO = "mamba_d_ssm", (None, "auto")
IN, KEY, OUT = "attention_in_multiplier", "key_multiplier", "attention_out_multiplier"
SSM_IN, SSM_OUT = "ssm_in_multiplier", "ssm_out_multiplier"
ONES = (IN, KEY, OUT, SSM_IN, SSM_OUT)
LISTS = {"mlp_multipliers": 2, "ssm_multipliers": 5}


def _factors(config: ConfigReader, key: str) -> list[float]:
    factors = config.get(key)
    factors = [1.0] * LISTS[key] if factors is None else factors
    known = isinstance(factors, list | tuple) and len(factors) == LISTS[key]
    if not known or not all(type(n) in (int, float) for n in factors):
        raise config.wrong(key, f"a list of {LISTS[key]} numbers", factors)
    return [float(n) for n in factors]


def _ssd(config: ConfigReader, fields: Mapping[str, Any]) -> SSDSpec:
    heads, stated = config.whole(SIZES["heads"]), config.get(INNER)
    inner = config.whole("mamba_expand") * fields["width"] if stated is None else config.whole(INNER)
    wide = inner // heads if config.get(SIZES["value_dim"]) in AUTO else config.whole(SIZES["value_dim"])
    if heads * wide != inner:
        raise ConfigError(
            f"config.json: {SIZES['heads']} {heads} x {SIZES['value_dim']} {wide} must be the inner width {inner}"
        )
    sizes: dict[str, Any] = {field: config.whole(key) for field, key in SIZES.items() if field != "value_dim"}
    flags = {field: config.flag(key) for field, key in FLAGS.items()}
    if flags["norm"] and config.flag("mamba_norm_before_gate"):
        raise ConfigError(
            "config.json: mamba_norm_before_gate true is unsupported; headway applies the norm after the gate"
        )
    if flags["bias"] != config.flag("projectors_bias"):
        raise ConfigError("config.json: mamba_proj_bias and projectors_bias must be equal")
    entry = config.number(SSM_IN)
    if flags["bias"] and entry != 1:
        raise ConfigError(f"config.json: {SSM_IN} must be 1 if mamba_proj_bias is true, got {entry}")
    factors = tuple(entry * factor for factor in _factors(config, "ssm_multipliers"))
    return SSDSpec(**sizes, value_dim=wide, **flags, factors=factors)


def _read(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    check_silu(fields)
    entry, key = config.number(IN), config.number(KEY)
    if fields["qkv_bias"] and entry != 1:
        raise ConfigError(f"config.json: {IN} must be 1 if attention_bias is true, got {entry}")
    gate, down = _factors(config, "mlp_multipliers")
    scale = entry * entry * key * fields["head_dim"] ** -0.5
    return {
        "mixers": Softmax(
            beside=_ssd(config, fields), factors=(entry * config.number(OUT), config.number(SSM_OUT))
        ),
        "patterns": Causal(),
        "attention_scale": None if entry == key == 1 else scale,
        "mlp_gate_scale": gate,
        "mlp_scale": down,
    }


def _write(spec: ModelSpec) -> dict[str, Any]:
    """Returns the keys: all factors of attention become one of keys and one of the output; that of the input is 1."""
    mixer, *more_mixers = {*spec.mixers}
    if more_mixers or not isinstance(mixer, Softmax) or not isinstance(ssd := mixer.beside, SSDSpec):
        raise Inexpressible("mixers")
    root, scale = spec.head_dim**-0.5, spec.attention_scale
    ratio = 1.0 if scale is None else scale / root
    # scale / root may be one rounding away from the n with n * root == scale: its neighbours are tried, too
    fits = (n for n in (ratio, nextafter(ratio, 0), nextafter(ratio, inf)) if n * root == (scale or root))
    if (key := next(fits, None)) is None:
        raise Inexpressible("attention_scale")
    return {
        **{key: getattr(ssd, field) for field, key in (*SIZES.items(), *FLAGS.items())},
        INNER: ssd.channels[2],
        "mamba_norm_before_gate": False,
        "projectors_bias": ssd.bias,
        **dict(zip(ONES, (1.0, key, mixer.factors[0], 1.0, mixer.factors[1]), strict=True)),
        "ssm_multipliers": list(ssd.factors),
        "mlp_multipliers": [spec.mlp_gate_scale, spec.mlp_scale],
    }


def _beside(mixer: Softmax) -> list[Rule]:
    assert isinstance(mixer.beside, SSDSpec)
    return ssd_rules(mixer.beside, f"{LAYER}mamba.", f"{MIXER}beside.")


FALCON_H1 = llama_layout(
    *("falcon_h1", "FalconH1ForCausalLM", None, 8192),
    {
        **BIAS,
        **MLP_BIAS,
        "norm_eps": Key("rms_norm_eps", 1e-5),
        "embedding_scale": Key("embedding_multiplier", 1.0),
        "logit_scale": Key("lm_head_multiplier", 1.0),
    },
    kv_heads=8,
    only={**STEPS, "mamba_use_mlp": (True, None), "attn_layer_indices": (None,)},
    harmless=("mamba_chunk_size", "num_logits_to_keep", "mlp_expansion_factor"),
    parts=(
        Part(
            {
                **dict(zip(SIZES.values(), (128, 1, 256, None, 4), strict=True)),
                **dict(zip(FLAGS.values(), (True, False, False), strict=True)),
                **dict.fromkeys(ONES, 1.0),
                **dict.fromkeys(("projectors_bias", *LISTS)),
                "mamba_norm_before_gate": True,
                "mamba_expand": 2,
                INNER: 1024,
            },
            _read,
            _write,
        ),
    ),
    tensors=renamed(BAMBA_NAMES, lambda spec: by_mixer(spec, {Softmax: _beside})),
)
