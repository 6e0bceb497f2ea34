"""Nemotron-H as `transformers` stores it (NVIDIA 2025): each of its layers is one sub-layer after a norm: state-space
duality, attention without positions, a feed-forward or experts with squared ReLU. Here a token mixer and the
feed-forward that follows it are one layer, so that "M-*-MM-" are four layers, of which the third has no
feed-forward."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from headway.attention.delta import SSDSpec
from headway.checkpoints.hf.config_keys import DECODER, ConfigReader, Inexpressible, Key, without
from headway.checkpoints.hf.layouts.base import Layout, Part
from headway.checkpoints.hf.layouts.experts import expert_names
from headway.checkpoints.hf.layouts.hybrids import LINEAR, mixer_keys
from headway.checkpoints.hf.layouts.mixtures_kin import DEEPSEEK
from headway.checkpoints.hf.layouts.rules import Rule, TensorNames, own_shapes, same
from headway.checkpoints.hf.layouts.ssd import OLD, ssd_rules
from headway.checkpoints.hf.windows import FULL, layer_types
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.models.mixers import Softmax
from headway.patterns import Causal
from headway.positions import NoPositions

DENSE, SPARSE = FEEDS = ("mlp", "moe")
LETTERS = {"M": LINEAR, "*": FULL, "-": DENSE, "E": SPARSE}
"""Letters of `hybrid_override_pattern`, by which published files list the kinds of layers."""
SIZES = ("mamba_num_heads", "n_groups", "ssm_state_size", "mamba_head_dim", "conv_kernel")
SSD = dict(zip(("heads", "key_heads", "head_dim", "value_dim", "conv"), SIZES, strict=True))
EXPERTS = replace(
    DEEPSEEK,
    shared="moe_shared_expert_intermediate_size",
    shared_by_count=False,
    always={**DEEPSEEK.always, "sum_eps": 1e-20},
)
WIDTH = EXPERTS.dense
WIDTHS = (WIDTH, EXPERTS.hidden, EXPERTS.shared)
TWINS = {"attention_head_dim": "head_dim", "rms_norm_eps": "norm_eps", "norm_eps": "norm_eps"}
"""Keys of published files that repeat other keys, which are those that transformers reads -> the field."""
KEYS = {
    **dict.fromkeys(TWINS),
    **dict.fromkeys(("layers_block_type", "hybrid_override_pattern", "layer_types", "use_bias")),
    **dict.fromkeys(EXPERTS.part.keys),
    **dict(zip(SIZES, (128, 8, 128, 64, 4), strict=True)),
    **dict(zip(WIDTHS, (21504, 7688, 7688), strict=True)),
    "use_conv_bias": True,
    "time_step_min": 1e-3,
    **EXPERTS.usual,
}


def _kinds(config: ConfigReader) -> list[str]:
    """Returns the kinds of the layers in transformers, each of which is one sub-layer."""
    kinds, letters = config.get("layers_block_type"), config.get("hybrid_override_pattern")
    if kinds is None:
        kinds = config.get("layer_types")
    if kinds is None and isinstance(letters, str) and {*letters} <= {*LETTERS}:
        kinds = [LETTERS[letter] for letter in letters]
    if kinds is None and letters is not None:
        raise config.wrong("hybrid_override_pattern", f"a text of the letters {''.join(LETTERS)}", letters)
    if not isinstance(kinds, list):
        raise config.wrong("layers_block_type", "a list of layer types", kinds)
    return [OLD.get(kind, kind) for kind in layer_types(kinds, len(kinds), (*LETTERS.values(), *OLD))]


def _read(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    kinds = _kinds(config)
    for key, field in TWINS.items():
        if config.get(key) not in (None, fields[field]):
            raise config.wrong(key, f"{fields[field]}, which transformers uses for it", config.get(key))
    pairs: list[list[str]] = []
    for i, kind in enumerate(kinds):
        if kind not in FEEDS:
            pairs.append([kind])
        elif not pairs or len(pairs[-1]) == 2:
            raise ConfigError(
                f"config.json: layer {i} is {kind}, which must directly follow an attention or mamba layer: headway "
                "has at most one feed-forward after each"
            )
        else:
            pairs[-1].append(kind)
    sizes: dict[str, Any] = {field: config.whole(key) for field, key in SSD.items()}
    step = config.number("time_step_min")
    ssd = SSDSpec(
        **sizes, conv_bias=config.flag("use_conv_bias"), bias=config.flag("use_bias"), least_step=step
    )
    feeds: dict[str, Any] = {"experts": None, "hidden": 0 if DENSE not in kinds else config.whole(WIDTH)}
    if SPARSE in kinds:
        (experts,) = {*EXPERTS.read(config, {"layers": 1})["experts"]}
        feeds = {
            "experts": [experts if pair[-1] == SPARSE else None for pair in pairs],
            "hidden": feeds["hidden"] or experts.hidden,
        }
    return {
        "layers": len(pairs),
        "mixers": tuple(ssd if pair[0] == LINEAR else Softmax() for pair in pairs),
        "layer_hidden": tuple(None if len(pair) == 1 and feeds["hidden"] else 0 for pair in pairs),
        "patterns": Causal(),
        "positions": NoPositions(),
        **feeds,
    }


def _write(spec: ModelSpec) -> dict[str, Any]:
    ssd, mixing = mixer_keys(spec, SSDSpec, LINEAR)
    kinds, sizes = [], {}
    for i, kind in enumerate(mixing):
        feed = SPARSE if spec.experts[i] else DENSE if spec.hidden_of(i) else None
        kinds += [kind] if feed is None else [kind, feed]
    if ssd is not None:
        sizes = {key: getattr(ssd, field) for field, key in SSD.items()}
        sizes |= {"use_conv_bias": ssd.conv_bias, "use_bias": ssd.bias, "time_step_min": ssd.least_step}
    experts = EXPERTS.write(spec) if any(spec.experts) else {WIDTH: spec.hidden}
    if spec.gated or {size for size in spec.layer_hidden if size}:
        raise Inexpressible("gated" if spec.gated else "layer_hidden")
    return {"layers_block_type": kinds, "num_hidden_layers": len(kinds), **sizes, **experts}


def blocks_of(spec: ModelSpec) -> Iterator[tuple[int, int]]:
    """Yields each layer and the number of its first block; a feed-forward is a second block of its layer."""
    block = 0
    for layer in range(spec.layers):
        yield layer, block
        block += 2 if spec.experts[layer] or spec.hidden_of(layer) else 1


def _rules(spec: ModelSpec, stacked: bool = False) -> list[Rule]:
    """Returns the rules of all tensors; `stacked`: the experts of a layer are in two tensors, as only in the class."""
    first, rules = "model." if stacked else "backbone.", list[Rule]()
    for layer, block in blocks_of(spec):
        mixing, feeding = f"{first}layers.{block}.", f"{first}layers.{block + 1}."
        ours, mixer, experts = f"model.layers.{layer}.", spec.mixers[layer], spec.experts[layer]
        if isinstance(mixer, SSDSpec):
            rules += ssd_rules(mixer, f"{mixing}mixer.", f"{ours}self_attn.")
        if stacked and experts:
            rules += [
                Rule(
                    expert_names(experts.count, part, layer=ours),
                    f"{feeding}mixer.experts.{part}_proj",
                    stacked=experts.count,
                )
                for part in ("up", "down")
            ]
        taken = {name for rule in rules for name in rule.ours}
        places = {
            f"{ours}input_layernorm.": f"{mixing}norm.",
            f"{ours}post_attention_layernorm.": f"{feeding}norm.",
            f"{ours}self_attn.": f"{mixing}mixer.",
            f"{ours}mlp.shared_expert.": f"{feeding}mixer.shared_experts.",
            f"{ours}mlp.": f"{feeding}mixer.",
        }
        for name in own_shapes(spec):
            place = next((place for place in places if name.startswith(place)), None)
            if place is not None and name not in taken:
                rules.append(same(name, places[place] + name.removeprefix(place)))
    ends = {
        "model.embed_tokens.weight": f"{first}embeddings.weight",
        "model.norm.weight": f"{first}norm_f.weight",
    }
    return [*rules, *(same(*pair) for pair in ends.items()), same("lm_head.weight", "lm_head.weight")]


NAMES = TensorNames(rules=_rules, unused=("mtp.",), outputs={"lm": "lm_head"})
NEMOTRON_H = Layout(
    family="nemotron_h",
    architectures={"NemotronHForCausalLM": "lm"},
    keys={
        **without(DECODER, "layers", "hidden", "tied"),
        "kv_heads": Key("num_key_value_heads", 8),
        "head_dim": Key("head_dim", 128),
        "activation": Key("mlp_hidden_act", "relu2"),
        "norm_eps": Key("layer_norm_epsilon", 1e-5),
        "mlp_bias": Key("mlp_bias"),
        "trained_context": Key("max_position_embeddings", 4096),
    },
    only={
        **dict.fromkeys(("attention_bias", "tie_word_embeddings", "residual_in_fp32"), (False, None)),
        **dict.fromkeys(("sliding_window", "moe_latent_size"), (None,)),
        "mamba_hidden_act": ("silu", None),
        "hidden_dropout": (0.0, None),
    },
    # keys of kernels, of training, of multi-token prediction and of positions, which attention has none of, and keys
    # that follow from others
    harmless=(
        *("auto_map", "time_step_rank", "rope_theta", "partial_rotary_factor"),
        *("num_hidden_layers", "expand", "chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype"),
        *("time_step_max", "time_step_floor", "time_step_limit", "rescale_prenorm_residual"),
        *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
        *("mamba_proj_bias", "n_shared_experts", "moe_shared_expert_overlap", "num_logits_to_keep"),
        "output_router_logits",
    ),
    parts=(Part(KEYS, _read, _write),),
    tensors=replace(
        NAMES, others={".mixer.experts.up_proj": replace(NAMES, rules=partial(_rules, stacked=True))}
    ),
)
