"""Nemotron-H in GGUF: each block is one sub-layer after a norm, as in its folders, and keys mean the same. The kind of
a block follows from its kv heads and its feed-forward width: attention has kv heads, a feed-forward has a width,
state-space duality has neither."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.checkpoints.formats.gguf.experts import with_experts
from headway.checkpoints.formats.gguf.layout import HEAD_DIMS, LAYER, MODULES, RMS, SIZES, TIED_VALUES
from headway.checkpoints.formats.gguf.mixers import KV_HEADS, NORM, SSD, each_layer
from headway.checkpoints.formats.gguf.rope import FACTORS
from headway.checkpoints.hf.config_keys import ConfigReader, Inexpressible, Key
from headway.checkpoints.hf.layouts import nemotron_h as folders
from headway.checkpoints.hf.layouts.base import Layout, Part
from headway.checkpoints.hf.layouts.hybrids import LINEAR, MIXER
from headway.checkpoints.hf.layouts.rules import Rule, decoder_names, own_shapes
from headway.checkpoints.hf.windows import FULL
from headway.models import ModelSpec

LEAST, SHARED = "time_step_min", "expert_shared_count"
HARMLESS = (RMS, "rope.dimension_count", "rope.freq_base", "rope.scaling.finetuned")
"""Keys that no layer needs, and one that repeats another."""
EXPERTS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
"""Keys of a folder and their names in GGUF."""
FIRST = (MIXER, "model.layers.#.input_layernorm.")
"""Prefixes of our names of a layer's first block."""
_plain = with_experts(decoder_names("", "token_embd", "output_norm", "blk.#.", MODULES, head="output"))


def _rules(spec: ModelSpec) -> list[Rule]:
    existing, plain, rules = own_shapes(spec), _plain.rules(spec), list[Rule]()
    for layer, first in folders.blocks_of(spec):
        mixer = spec.mixers[layer]
        mixing = SSD.rules(mixer) if isinstance(mixer, SSD.kind) else []
        taken = {name for rule in mixing for name in rule.ours}
        for rule in [*mixing, *(rule for rule in plain if rule.ours[0] not in taken)]:
            if "#" in rule.ours[0] and (named := rule.at(str(layer))).ours[0] in existing:
                block = first if rule.ours[0].startswith(FIRST) else first + 1
                theirs = rule.theirs.replace("ffn_norm", "attn_norm").replace("#", str(block))
                rules.append(replace(named, theirs=theirs))
    return [*rules, *(rule for rule in plain if "#" not in rule.ours[0])]


def nemotron_h(name: str, sparse: bool) -> Layout:
    """Returns the layout of one architecture; if it is `sparse`, its feed-forwards are experts."""
    experts = {theirs: f"{name}.{key}" for theirs, key in EXPERTS.items()} if sparse else {}
    blocks, *lists = (f"{name}.{key}" for key in (SIZES["layers"], KV_HEADS, SIZES["hidden"]))
    ssm, part, shared = [f"{name}.{key}" for key in SSD.keys], folders.NEMOTRON_H.parts[0], f"{name}.{SHARED}"
    feed, other = (folders.SPARSE, folders.DENSE) if sparse else (folders.DENSE, folders.SPARSE)

    def read(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
        layers = config.whole(blocks)
        kv_heads, widths = (each_layer(config, key, layers) for key in lists)
        for key, each in zip(lists, (kv_heads, widths), strict=True):
            if len({*each} - {0}) > 1:
                raise config.wrong(key, "one number, or 0, for each layer", each)
        ssd = SSD.read(config.below(f"{name}."))
        blocks_of = zip(kv_heads, widths, strict=True)
        keys = {
            **{theirs: config.get(key) for theirs, key in experts.items()},
            **{key: getattr(ssd, field) for field, key in folders.SSD.items()},
            "layers_block_type": [FULL if kv else feed if width else LINEAR for kv, width in blocks_of],
            folders.WIDTH: max(widths),
            LEAST: 0.0,
        }
        values = part.read(ConfigReader(keys, folders.NEMOTRON_H.defaults), fields)
        return {**values, "kv_heads": max(kv_heads) or fields["heads"]}

    def write(spec: ModelSpec) -> dict[str, Any]:
        keys = part.write(spec)
        kinds = keys["layers_block_type"]
        if other in kinds or (sparse and not keys[folders.EXPERTS.shared]):
            raise Inexpressible("experts")
        if LEAST not in keys or keys[LEAST]:
            raise Inexpressible(LEAST if LEAST in keys else "mixers")
        ssd = next(mixer for mixer in spec.mixers if isinstance(mixer, SSD.kind))
        width = keys["moe_intermediate_size"] if sparse else spec.hidden
        return {
            blocks: len(kinds),
            lists[0]: [spec.kv_heads if kind == FULL else 0 for kind in kinds],
            lists[1]: [width if kind == feed else 0 for kind in kinds],
            **{f"{name}.{key}": size for key, size in SSD.write(ssd).items()},
            **{key: keys[theirs] for theirs, key in experts.items()},
            **({shared: 1} if sparse else {}),
        }

    sizes = {field: Key(f"{name}.{key}") for field, key in SIZES.items() if field not in ("layers", "hidden")}
    return Layout(
        family="nemotron_h",
        architectures={name: "lm"},
        keys={
            **sizes,
            "head_dim": Key(tuple(f"{name}.{key}" for key in HEAD_DIMS)),
            "norm_eps": Key(f"{name}.{LAYER}"),
        },
        only={shared: (1,), "tied": (False,), FACTORS: (None,)},
        harmless=(NORM, TIED_VALUES, *(f"{name}.{key}" for key in HARMLESS)),
        parts=(Part(dict.fromkeys((blocks, *lists, *ssm, *experts.values())), read, write),),
        tensors=replace(_plain, rules=_rules),
    )
