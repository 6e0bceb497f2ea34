"""Decoders with token mixers other than attention in some layers, as `transformers` stores them.

Qwen3.5's text models (Qwen team 2026) have the gated delta rule in three of four layers, and in the fourth attention
with an output gate, whose matrix is fused with that of the queries, head by head; norms are x / |x| * (1 + w) with w
stored. Their mixtures, and Qwen3-Next (Qwen team 2025), have the experts of Qwen2-MoE instead of the feed-forward.
Qwen3-Next has queries, keys, values and gates of each key head in one matrix, betas and decays in another; Qwen3.5's
published files have the experts of a layer in two tensors, and those that transformers writes in matrices of each
expert. Lara Mini (Translated 2026; transformers 5.24) has Qwen3's attention, with rotary positions in layers with
windows and no positions in the others, between layers of Qwen3.5's gated delta rule, whose matrices are fused into one,
and experts, with a shared one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from headway.attention.delta import DeltaSpec
from headway.checkpoints.hf.config_keys import ConfigReader, Inexpressible, Key
from headway.checkpoints.hf.layouts.base import Part
from headway.checkpoints.hf.layouts.experts import NORMALIZED, STEPS, ExpertKeys, stacked
from headway.checkpoints.hf.layouts.llama import BIAS, llama_layout
from headway.checkpoints.hf.layouts.parts import in_windows
from headway.checkpoints.hf.layouts.rules import Rule, lifted, same
from headway.checkpoints.hf.layouts.tensors import renamed
from headway.checkpoints.hf.rope import PARTIAL, ROPE, read_rope, write_rope
from headway.checkpoints.hf.windows import FULL, SLIDING, UNUSED, every, from_foreign, read_kinds, window_keys
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.models.mixers import Softmax
from headway.patterns import Causal

LINEAR = "linear_attention"
MIXER = "model.layers.#.self_attn."
DELTA_LAYER = "model.layers.#.linear_attn."
"""Prefix of names of a layer of the delta rule in transformers."""
DELTA_SIZES = {
    "heads": "linear_num_value_heads",
    "key_heads": "linear_num_key_heads",
    "head_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv": "linear_conv_kernel_dim",
}
"""Fields of a `DeltaSpec` and their keys."""


def by_mixer(spec: ModelSpec, rules: Mapping[type, Callable[[Any], Sequence[Rule]]]) -> list[Rule]:
    """Returns the rules of each layer's token mixer, from the function that `rules` has for its type."""
    return [
        rule.at(str(i))
        for i, mixer in enumerate(spec.mixers)
        if type(mixer) in rules
        for rule in rules[type(mixer)](mixer)
    ]


def mixed(kinds: Sequence[str], other: Any) -> dict[str, Any]:
    """Returns the fields `mixers` and `patterns` of layers with full causal attention or with the mixer `other`."""
    return {"mixers": tuple(Softmax() if kind == FULL else other for kind in kinds), "patterns": Causal()}


def mixer_keys(spec: ModelSpec, kind: type, name: str) -> tuple[Any, list[str]]:
    """Returns the one mixer of type `kind` that a spec has besides softmax attention (or None), and `layer_types`, in
    which its layers are called `name`. Raises Inexpressible for other mixers."""
    mixers = {mixer for mixer in spec.mixers if mixer != Softmax()}
    if len(mixers) > 1 or not all(isinstance(mixer, kind) for mixer in mixers):
        raise Inexpressible("mixers")
    return next(iter(mixers), None), [FULL if mixer == Softmax() else name for mixer in spec.mixers]


def check_silu(fields: Mapping[str, Any]) -> None:
    """Raises ConfigError for an activation other than silu, which is also that of the convolutions."""
    if fields["activation"] != "silu":
        raise ConfigError(
            f"config.json: hidden_act must be silu, got {fields['activation']}: transformers also applies it after "
            "the convolutions, where headway has silu only"
        )


def rope_of(config: ConfigReader) -> Mapping[str, Any]:
    """Returns the object `rope_parameters`, or an empty one. Raises ConfigError for other values."""
    rope = config.get("rope_parameters")
    if rope is not None and not isinstance(rope, Mapping):
        raise config.wrong("rope_parameters", "null or an object", rope)
    return rope or {}


def _read_delta(config: ConfigReader) -> DeltaSpec:
    sizes: dict[str, Any] = {name: config.whole(key) for name, key in DELTA_SIZES.items()}
    return DeltaSpec(**sizes)


def _write_delta(spec: ModelSpec) -> dict[str, Any]:
    """Returns the sizes of the delta rule, if a layer has it, and the kinds of layers."""
    delta, kinds = mixer_keys(spec, DeltaSpec, LINEAR)
    sizes = {key: getattr(delta, name) for name, key in DELTA_SIZES.items()} if delta else {}
    return {"layer_types": kinds, **sizes}


def _read_qwen(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns mixers, patterns and positions of Qwen3-Next and Qwen3.5."""
    check_silu(fields)
    usual = every(4, -1, LINEAR, key="full_attention_interval")
    kinds = read_kinds(config, fields["layers"], usual, (FULL, LINEAR))
    # keys of the three coordinates of an image patch, which are equal for text tokens
    rope = {key: value for key, value in rope_of(config).items() if not key.startswith("mrope_")}
    keys = {**{key: config.get(key) for key in ROPE}, "rope_parameters": rope}
    return {
        **mixed(kinds, _read_delta(config)),
        **read_rope(ConfigReader(keys, config.defaults), fields["head_dim"], share=config.number(PARTIAL)),
    }


def _write_qwen(spec: ModelSpec) -> dict[str, Any]:
    """Returns the keys that `_read_qwen` reads."""
    return {**_write_delta(spec), **write_rope(spec, share=PARTIAL)}


def gated_rules(spec: ModelSpec) -> list[Rule]:
    """Returns the rules of softmax attention whose gate is fused with the queries head by head: rows q0 g0 q1 g1 ..."""
    rows = (spec.heads * spec.head_dim,) * 2
    query = tuple(f"{MIXER}{n}_proj.weight" for n in "qg")
    plain = ("k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    return [
        Rule(query, query[0], rows, spec.heads),
        *(same(n, n) for n in (f"{MIXER}{name}.weight" for name in plain)),
    ]


INNER = {
    "o_proj.weight": "out_proj.weight",
    "norm.weight": "norm.weight",
    "qkv_conv": "conv1d.weight",
    "log_rate": "A_log",
    "decay_bias": "dt_bias",
}
_QWEN_DELTA = {
    "qkv_proj.weight": "in_proj_qkv.weight",
    "gate_proj.weight": "in_proj_z.weight",
    "beta_proj.weight": "in_proj_b.weight",
    "decay_proj.weight": "in_proj_a.weight",
    **INNER,
}


def delta_rules(delta: DeltaSpec, names: Mapping[str, str]) -> list[Rule]:
    """Returns the rules of a layer of the gated delta rule; `names` are our tensors -> theirs. A name that begins with
    "qkv" stands for queries, keys and values, one after the other in one tensor."""
    rules = []
    for ours, theirs in names.items():
        fused = ours.startswith("qkv")
        parts = [ours.replace("qkv", letter) for letter in "qkv"] if fused else [ours]
        rows = delta.channels if fused else ()
        rule = Rule(tuple(MIXER + part for part in parts), f"{DELTA_LAYER}{theirs}", rows)
        rules.append(replace(rule, changes=(lifted(1),) * len(parts)) if ours.endswith("conv") else rule)
    return rules


def _qwen_rules(spec: ModelSpec, delta: Callable[[DeltaSpec], Sequence[Rule]]) -> list[Rule]:
    """Returns the rules of token mixers in Qwen3-Next and Qwen3.5, whose rules for the delta rule differ (`delta`)."""
    return by_mixer(spec, {Softmax: lambda softmax: gated_rules(spec), DeltaSpec: delta})


_names = partial(renamed, {}, unused=("mtp.",))
_qwen3_5 = partial(_qwen_rules, delta=partial(delta_rules, names=_QWEN_DELTA))
QWEN_MIXERS = Part(
    {
        **dict.fromkeys((*ROPE, "full_attention_interval")),
        **dict(zip(DELTA_SIZES.values(), (32, 16, 128, 128, 4), strict=True)),
    },
    _read_qwen,
    _write_qwen,
)
QWEN: Mapping[str, Any] = {
    "head_dim": Key("head_dim", 256),
    "harmless": ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    "only": {
        "attn_output_gate": (True, None),
        "mlp_only_layers": ([], None),
        "output_gate_type": ("swish", None),
    },
    "more": {PARTIAL: 0.25},
    "rope": None,
    "parts": (QWEN_MIXERS,),
}
"""Arguments that the layouts of Qwen3-Next and Qwen3.5 share."""
QWEN3_5 = llama_layout(
    *("qwen3_5_text", "Qwen3_5ForCausalLM", None, 32768),
    kv_heads=4,
    tensors=_names(_qwen3_5),
    **QWEN,
)


SHARED: Mapping[str, Any] = {"shared": "shared_expert_intermediate_size", "always": {"shared_gate": True}}
WIDTHS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}


def _fused(delta: DeltaSpec, *parts: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns our tensors of these parts of a layer of the delta rule, and the rows of each in the fused tensor."""
    queries, keys, values = delta.channels
    rows = {"q": queries, "k": keys, "v": values, "gate": values, "beta": delta.heads, "decay": delta.decays}
    return tuple(f"{MIXER}{part}_proj.weight" for part in parts), tuple(rows[part] for part in parts)


def _next_delta(delta: DeltaSpec) -> list[Rule]:
    fused = {"qkvz": _fused(delta, "q", "k", "v", "gate"), "ba": _fused(delta, "beta", "decay")}
    return [
        *delta_rules(delta, INNER),
        *(
            Rule(parts, f"{DELTA_LAYER}in_proj_{name}.weight", rows, delta.key_heads)
            for name, (parts, rows) in fused.items()
        ),
    ]


QWEN3_NEXT = llama_layout(
    *("qwen3_next", "Qwen3NextForCausalLM", None, 32768),
    experts=ExpertKeys(
        **SHARED, others=NORMALIZED, sparse=STEPS, aux=0.001, usual={**WIDTHS, "norm_topk_prob": True}
    ),
    kv_heads=2,
    tensors=_names(partial(_qwen_rules, delta=_next_delta)),
    **QWEN,
)


def _stacked(spec: ModelSpec) -> list[Rule]:
    return [*_qwen3_5(spec), *stacked(spec)]


QWEN3_5_MOE = llama_layout(
    *("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", None, 32768),
    experts=ExpertKeys(**SHARED, dense="moe_intermediate_size", aux=0.001, usual=WIDTHS),
    kv_heads=2,
    tensors=_names(_qwen3_5, others={".mlp.experts.gate_up_proj": _names(_stacked)}),
    **{**QWEN, "harmless": (*QWEN["harmless"], "intermediate_size")},
)


LARA = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)


def _read_lara(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    check_silu(fields)
    layers, window = fields["layers"], from_foreign("sliding_window", config.whole("sliding_window"))
    usual = [LARA[i % len(LARA)] for i in range(layers)]
    kinds = read_kinds(config, layers, usual, (FULL, SLIDING, LINEAR))
    mixers = mixed([FULL if kind == SLIDING else kind for kind in kinds], _read_delta(config))
    mixers["patterns"] = tuple(window if kind == SLIDING else Causal() for kind in kinds)
    return {**mixers, **in_windows(config, {**fields, **mixers})}


def _write_lara(spec: ModelSpec) -> dict[str, Any]:
    windows, delta = window_keys(spec, UNUSED), _write_delta(spec)
    pairs = zip(delta["layer_types"], windows["layer_types"], strict=True)
    return {**windows, **delta, "layer_types": [a if a == LINEAR else b for a, b in pairs]}


def _lara_delta(delta: DeltaSpec) -> list[Rule]:
    parts, rows = _fused(delta, "q", "k", "v", "gate", "beta", "decay")
    return [
        *delta_rules(delta, {**INNER, "norm.weight": "out_norm.weight"}),
        Rule(parts, f"{DELTA_LAYER}in_proj.weight", rows),
    ]


LARA_MINI = llama_layout(
    *("lara_mini", "LaraMiniForCausalLM", None, 131072),
    {**BIAS, "tied": Key("tie_word_embeddings", True)},
    experts=ExpertKeys(
        shared=SHARED["shared"],
        dense="moe_intermediate_size",
        others=NORMALIZED,
        aux=0.001,
        usual={**WIDTHS, "norm_topk_prob": True},
    ),
    kv_heads=4,
    head_dim=Key("head_dim", 128),
    more={"sliding_window": 512},
    parts=(
        Part(dict(zip(DELTA_SIZES.values(), (16, 8, 128, 128, 4), strict=True)), _read_lara, _write_lara),
    ),
    tensors=renamed({}, lambda spec: [*by_mixer(spec, {DeltaSpec: _lara_delta}), *stacked(spec)]),
)
