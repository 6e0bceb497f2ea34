"""OLMo 1, 2, 3 and Hybrid as `transformers` stores them (Groeneveld et al. 2024; OLMo team 2025, 2026); tensors of the
first three have our own names.

OLMo 1 has LayerNorm without weights; the others normalize outputs of sub-layers, and all queries and keys of a token
together; 3 has windows in three of four layers; Hybrid has the gated delta rule, with pre-norms."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from headway.attention.delta import DeltaSpec
from headway.checkpoints.hf.config_keys import ConfigReader, Inexpressible, Key
from headway.checkpoints.hf.layouts.base import Part
from headway.checkpoints.hf.layouts.hybrids import (
    DELTA_SIZES,
    LINEAR,
    by_mixer,
    check_silu,
    delta_rules,
    mixed,
    mixer_keys,
    rope_of,
)
from headway.checkpoints.hf.layouts.llama import BIAS, FREE, llama_layout
from headway.checkpoints.hf.layouts.parts import rope_by_kind
from headway.checkpoints.hf.layouts.tensors import renamed
from headway.checkpoints.hf.rope import ROPE, read_rope, write_rope
from headway.checkpoints.hf.windows import FULL, SLIDING, UNUSED, every, read_kinds
from headway.models import ModelSpec
from headway.positions import NoPositions

KEYS = {**BIAS, "head_dim": FREE, "norm_eps": Key("rms_norm_eps", 1e-5)}
BASES = {FULL: ("rope_theta", 5e5), SLIDING: ("rope_theta", 5e5)}
OLMO = llama_layout(
    *("olmo", "OlmoForCausalLM", "none", 2048, BIAS),
    head_dim=FREE,
    without=("norm_eps",),
    only={"clip_qkv": (None,)},  # bounds queries, keys and values
)
OLMO2 = llama_layout("olmo2", "Olmo2ForCausalLM", "none", 2048, KEYS)
OLMO3 = llama_layout(
    *("olmo3", "Olmo3ForCausalLM", "layer", 2048, KEYS),
    usual=every(4, 3),
    unused=UNUSED,
    rope=None,
    parts=(rope_by_kind(BASES),),
)
DELTA = {
    **{f"{part}_proj.weight": f"{part}_proj.weight" for part in "qkvo"},
    **{f"{part}_conv": f"{part}_conv1d.weight" for part in "qkv"},
    "gate_proj.weight": "g_proj.weight",
    "beta_proj.weight": "b_proj.weight",
    "decay_proj.weight": "a_proj.weight",
    "norm.weight": "o_norm.weight",
    "log_rate": "A_log",
    "decay_bias": "dt_bias",
}
NEGATIVE, FRONT = "linear_allow_neg_eigval", ".feedforward_layer_norm."
HYBRID = {**dict.fromkeys((*ROPE, *DELTA_SIZES.values())), DELTA_SIZES["conv"]: 4, NEGATIVE: True}


def _read_hybrid(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    check_silu(fields)
    heads, width, layers = fields["heads"], fields["width"], fields["layers"]
    usual = every(4, -1, LINEAR)(config, layers)
    usual = usual if FULL in usual else [*usual[:-1], FULL]
    kinds = read_kinds(config, layers, usual, (FULL, LINEAR))
    key_heads = config.whole(DELTA_SIZES["key_heads"], heads)
    dim = config.whole(DELTA_SIZES["head_dim"], int(0.75 * width / key_heads))
    delta = DeltaSpec(
        heads=config.whole(DELTA_SIZES["heads"], heads),
        key_heads=key_heads,
        head_dim=dim,
        value_dim=config.whole(DELTA_SIZES["value_dim"], 2 * dim),
        conv=config.whole(DELTA_SIZES["conv"]),
        beta_scale=2.0 if config.flag(NEGATIVE) else 1.0,
        norm_eps=1e-5,
        order="pre",
    )
    rotates = (rope_of(config).get("rope_theta") or config.get("rope_theta")) is not None
    nowhere = {"positions": NoPositions(), "trained_context": config.whole("max_position_embeddings")}
    return {
        **mixed(kinds, delta),
        **(read_rope(config, fields["head_dim"]) if rotates else nowhere),
    }


def _write_hybrid(spec: ModelSpec) -> dict[str, Any]:
    delta, kinds = mixer_keys(spec, DeltaSpec, LINEAR)
    if delta is None or FULL not in kinds:
        raise Inexpressible("mixers")
    sizes = {key: getattr(delta, name) for name, key in DELTA_SIZES.items()}
    nowhere = {
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
        "max_position_embeddings": spec.trained_context,
    }
    rope = nowhere if spec.positions == NoPositions() else write_rope(spec)
    return {"layer_types": kinds, **sizes, NEGATIVE: delta.beta_scale == 2, **rope}


OLMO_HYBRID = llama_layout(
    *("olmo_hybrid", "OlmoHybridForCausalLM", None, 65536),
    {**KEYS, "norm_eps": Key("rms_norm_eps", 1e-6)},
    harmless=tuple(
        f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")
    ),
    rope=None,
    parts=(Part(HYBRID, _read_hybrid, _write_hybrid),),
    tensors=renamed(
        {".input_layernorm.": ".attention_layer_norm.", ".post_attention_layernorm.": FRONT},
        lambda spec: by_mixer(spec, {DeltaSpec: partial(delta_rules, names=DELTA)}),
        renamed={".post_attention_layernorm.weight": f"{FRONT}weight"},
    ),
)
