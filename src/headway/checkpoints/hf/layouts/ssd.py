"""Models with layers of state-space duality (SSD) as `transformers` stores them.

Mamba-2 (Dao and Gu 2024) has no other layers, and neither feed-forward nor positions; Bamba (IBM and others 2024) has
attention between them, with half of each head rotated; Granite 4 (IBM 2025) has Granite's multipliers, attention mostly
without positions, and experts or none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from headway.attention.delta import SSDSpec
from headway.checkpoints.hf.config_keys import SIZES, ConfigReader, Inexpressible, Key
from headway.checkpoints.hf.layouts.base import Layout, Part
from headway.checkpoints.hf.layouts.experts import AUX, LAYER
from headway.checkpoints.hf.layouts.granite import COUNT, FACTORS, NUMBERS, SHARED, expert_rules
from headway.checkpoints.hf.layouts.hybrids import LINEAR, MIXER, by_mixer, check_silu, mixed, mixer_keys
from headway.checkpoints.hf.layouts.llama import BIAS, FREE, MLP_BIAS, llama_layout
from headway.checkpoints.hf.layouts.rules import Rule, TensorNames, lifted, module_rules, same, within
from headway.checkpoints.hf.layouts.tensors import renamed
from headway.checkpoints.hf.rope import PARTIAL
from headway.checkpoints.hf.windows import FULL, read_kinds
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.positions import NoPositions

FIELDS = ("heads", "key_heads", "head_dim", "value_dim", "conv", "conv_bias", "bias")
_parts = ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "conv_bias", "proj_bias", "expand")
MAMBA = tuple(f"mamba_{part}" for part in _parts)
"""The keys of `FIELDS` of an `SSDSpec`, and of the ratio of its values' width to the model's."""
MAMBA_2 = (
    *("num_heads", "n_groups", "state_size", "head_dim", "conv_kernel", "use_conv_bias", "use_bias"),
    "expand",
)
USUAL = dict(zip(MAMBA, (128, 1, 256, None, 4, True, False, 2), strict=True))
STEPS: Mapping[str, tuple[Any, ...]] = {
    "time_step_limit": ([0.0, {"__float__": "Infinity"}], [0.0, inf], (0.0, inf))
}
OLD = {"mamba": LINEAR, "attention": FULL}
"""Kinds of layers in published files, the only ones that llama.cpp's converter knows."""
PUBLISHED = {new: old for old, new in OLD.items()}


def _read(
    config: ConfigReader, fields: Mapping[str, Any], kinds: Sequence[str], keys: Sequence[str] = MAMBA
) -> dict[str, Any]:
    """Returns the fields `mixers` and `patterns`: state-space duality in the linear layers, else attention."""
    return mixed(kinds, _read_ssd(config, fields, keys) if LINEAR in kinds else None)


def _read_ssd(config: ConfigReader, fields: Mapping[str, Any], keys: Sequence[str]) -> SSDSpec:
    check_silu(fields)
    *parts, expand = keys
    heads, inner = config.whole(parts[0]), config.whole(expand) * fields["width"]
    auto = parts[3] if config.get(parts[3]) in (None, "auto") else None
    sizes: dict[str, Any] = {
        field: inner // heads if key == auto else config.flag(key) if "bias" in field else config.whole(key)
        for field, key in zip(FIELDS, parts, strict=True)
    }
    ssd = SSDSpec(**sizes)
    if ssd.channels[2] != inner:
        raise ConfigError(
            f"config.json: {parts[0]} {heads} x {parts[3]} {ssd.value_size} must be {expand} x hidden_size = {inner}"
        )
    return ssd


def _write(spec: ModelSpec, keys: Sequence[str] = MAMBA) -> tuple[dict[str, Any], list[str]]:
    """Returns the keys, and the kinds of layers. Without SSD layers, the keys are those that transformers requires."""
    ssd, kinds = mixer_keys(spec, SSDSpec, LINEAR)
    if ssd is None:
        return {keys[0]: 1}, kinds
    times, remainder = divmod(ssd.channels[2], spec.width)
    if remainder:
        raise Inexpressible("mixers")
    return dict(zip(keys, (*(getattr(ssd, name) for name in FIELDS), times), strict=True)), kinds


def ssd_rules(ssd: SSDSpec, theirs: str, ours: str = MIXER) -> list[Rule]:
    """Returns the rules of a layer of state-space duality; `theirs` and `ours` are the prefixes of its names."""
    rows = ssd.channels[2], sum(ssd.channels), ssd.heads
    names = {"log_rate": "A_log", "step_bias": "dt_bias", "skip": "D"}
    names |= {"norm.weight": "norm.weight"} if ssd.norm else {}
    names |= {"conv_bias": "conv1d.bias"} if ssd.conv_bias else {}
    rules = [same(f"{ours}{a}", f"{theirs}{b}") for a, b in names.items()]
    rules.append(Rule((f"{ours}conv",), f"{theirs}conv1d.weight", changes=(lifted(1),)))
    for leaf in ("weight", "bias")[: 1 + ssd.bias]:
        parts = tuple(f"{ours}{part}_proj.{leaf}" for part in ("gate", "mixed", "step"))
        rules.append(Rule(parts, f"{theirs}in_proj.{leaf}", rows))
        rules.append(same(f"{ours}o_proj.{leaf}", f"{theirs}out_proj.{leaf}"))
    return rules


def _rules(spec: ModelSpec, place: str = "mamba") -> list[Rule]:
    """Returns the rules of layers of state-space duality, whose module in a transformers block is called `place`."""
    return by_mixer(spec, {SSDSpec: partial(ssd_rules, theirs=f"{LAYER}{place}.")})


def _mamba2_rules(spec: ModelSpec) -> list[Rule]:
    modules = {"embed_tokens": "embeddings", "norm": "norm_f", "layers.#.input_layernorm": "layers.#.norm"}
    rules = [
        *_rules(spec, "mixer"),
        *(same(f"model.{a}.weight", f"model.{b}.weight") for a, b in modules.items()),
    ]
    rules += [] if spec.tied else [same("lm_head.weight", "lm_head.weight")]
    return [replace(rule, theirs=rule.theirs.replace("model.", "backbone.")) for rule in rules]


MAMBA2 = Layout(
    family="mamba2",
    architectures={"Mamba2ForCausalLM": "lm"},
    keys={
        **{name: SIZES[name] for name in ("vocab", "width", "layers")},
        **dict.fromkeys(("heads", "kv_heads"), Key("num_heads")),
        "head_dim": Key("head_dim"),
        "activation": Key("hidden_act", "silu"),
        "norm_eps": Key("layer_norm_epsilon", 1e-5),
        "init_std": Key("initializer_range", 0.1),
        "tied": Key("tie_word_embeddings"),
    },
    only={**STEPS, "rms_norm": (True, None)},
    # keys of kernels, of rounding and of training
    harmless=(
        *("chunk_size", "norm_before_gate", "residual_in_fp32", "rescale_prenorm_residual"),
        *(f"time_step_{name}" for name in ("rank", "min", "max", "floor")),
    ),
    parts=(
        Part(
            dict(zip(MAMBA_2, (128, 8, 128, 64, 4, True, False, 2), strict=True)),
            lambda config, fields: {
                **_read(config, fields, [LINEAR] * fields["layers"], MAMBA_2),
                "hidden": 0,
            },
            lambda spec: _write(spec, MAMBA_2)[0],
        ),
    ),
    tensors=TensorNames(
        rules=_mamba2_rules,
        aliases=lambda spec: {"lm_head.weight": "backbone.embeddings.weight"},
        renamed={"backbone.embedding.weight": "backbone.embeddings.weight"},
        outputs={"lm": "lm_head"},
    ),
)


def _read_bamba(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    full = config.get("attn_layer_indices") or []
    if not isinstance(full, list) or not all(type(i) is int for i in full):
        raise config.wrong("attn_layer_indices", "a list of numbers of layers", full)
    return _read(config, fields, [FULL if i in full else LINEAR for i in range(fields["layers"])])


def _write_bamba(spec: ModelSpec) -> dict[str, Any]:
    keys, kinds = _write(spec)
    return {**keys, "attn_layer_indices": [i for i, kind in enumerate(kinds) if kind == FULL]}


BAMBA_NAMES = {
    ".mlp.": ".feed_forward.",
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
    "model.norm.": "model.final_layernorm.",
}
BAMBA = llama_layout(
    *("bamba", "BambaForCausalLM", None, 262144),
    {**BIAS, **MLP_BIAS, "norm_eps": Key("rms_norm_eps", 1e-5)},
    kv_heads=8,
    head_dim=FREE,
    more={PARTIAL: 0.5},
    only=STEPS,
    harmless=("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"),
    rope=PARTIAL,
    parts=(Part({**USUAL, "attn_layer_indices": None}, _read_bamba, _write_bamba),),
    tensors=renamed(BAMBA_NAMES, _rules),
)


def _read_granite(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    layers, marks = fields["layers"], config.get("position_embedding_type")
    if marks not in ("rope", "nope", None):
        raise config.wrong("position_embedding_type", 'null, "nope" or "rope"', marks)
    kinds = read_kinds(config, layers, [LINEAR] * layers, (FULL, LINEAR, *OLD))
    dense = not config.whole(COUNT[0], least=0)
    return {
        **({} if marks == "rope" else {"positions": NoPositions()}),
        **({"hidden": config.whole(SHARED.shared)} if dense else SHARED.read(config, fields)),
        **_read(config, fields, [OLD.get(kind, kind) for kind in kinds]),
    }


def _write_granite(spec: ModelSpec) -> dict[str, Any]:
    keys, kinds = _write(spec)
    dense = {COUNT[0]: 0, SHARED.dense: spec.hidden, SHARED.shared: spec.hidden}
    marks = None if spec.positions == NoPositions() else "rope"
    more = {"layer_types": [PUBLISHED[kind] for kind in kinds], "position_embedding_type": marks}
    return {**keys, **(SHARED.write(spec) if any(spec.experts) else dense), **more}


def _granite_rules(spec: ModelSpec) -> list[Rule]:
    names = {"mlp.gate_up_proj": "shared_mlp.input_linear", "mlp.down_proj": "shared_mlp.output_linear"}
    dense = module_rules(spec, within(LAYER, LAYER, names))
    return [*_rules(spec), *(expert_rules(spec) if any(spec.experts) else dense)]


GRANITE_KEYS = {
    **USUAL,
    COUNT[0]: 8,
    SHARED.top: 2,
    SHARED.hidden: 11008,
    SHARED.shared: 1024,
    AUX: SHARED.aux,
    "position_embedding_type": None,
}
GRANITE_HYBRID = llama_layout(
    *("granitemoehybrid", "GraniteMoeHybridForCausalLM", None, 2048),
    {key: value for key, value in FACTORS.items() if key not in MLP_BIAS},
    head_dim=FREE,
    without=("hidden",),
    only={**STEPS, "normalization_function": ("rmsnorm", None)},
    harmless=(*SHARED.harmless, "mamba_chunk_size", "init_method"),
    parts=(NUMBERS, Part(GRANITE_KEYS, _read_granite, _write_granite)),
    tensors=renamed({".mlp.gate.": ".block_sparse_moe.router.layer."}, _granite_rules),
)
