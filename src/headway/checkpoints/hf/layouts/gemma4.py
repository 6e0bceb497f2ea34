"""Gemma 4 (text) as `transformers` stores it: E2B, E4B and 31B (Gemma team 2026).

Layers that see all have heads of another size than those with windows, and rotate a share of it; the last layers attend
to the keys and values of the last of their kind before them, and may have twice as wide feed-forwards. Where
`per_layer_config` does not say the sizes, `global_head_dim` and `num_global_key_value_heads` do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader, Inexpressible
from headway.checkpoints.hf.layer_types import (
    FULL,
    SLIDING,
    every,
    read_kinds,
    read_rope_by_kind,
    read_windows,
    write_by_kind,
)
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.gemma import NO_CAPS, gemma_keys
from headway.checkpoints.hf.layouts.rules import Rule, own_shapes, same
from headway.checkpoints.hf.layouts.tensors import OWN_NAMES
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.models.family import scaled_embedding
from headway.models.mixers import Softmax

BASES = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
ROPE: Mapping[str, Mapping[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
COLUMNS, VOCAB = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
SIZES = {"head_dim": "head_dim", "kv_heads": "num_key_value_heads"}
"""Fields of `Softmax` and their keys in `per_layer_config`."""


def _sizes(given: ConfigReader, kinds: Sequence[str], fields: Mapping[str, Any]) -> list[dict[str, int]]:
    """Sizes of heads in each layer."""
    each, tied = given.get("per_layer_config"), given.flag("attention_k_eq_v")
    if each is None:
        wide = {"head_dim": given.whole("global_head_dim", 512)}
        if tied and given.get("num_global_key_value_heads") is not None:
            wide["num_key_value_heads"] = given.whole("num_global_key_value_heads")
        each = {str(i): wide for i, kind in enumerate(kinds) if kind == FULL}
    numbers = {str(i) for i in range(len(kinds))}
    if not isinstance(each, Mapping) or not all(
        str(i) in numbers and isinstance(sizes, Mapping) and {*sizes} <= {*SIZES.values()}
        for i, sizes in each.items()
    ):
        raise given.wrong("per_layer_config", f"layers and their {' and '.join(SIZES.values())}", each)
    by_layer = [ConfigReader(each.get(str(i), {}), {}) for i in range(len(kinds))]
    return [{name: own.whole(key, fields[name]) for name, key in SIZES.items()} for own in by_layer]


def _mixers(given: ConfigReader, kinds: Sequence[str], sizes: Sequence[Mapping[str, int]]) -> list[Softmax]:
    """The attention of each layer: the last `num_kv_shared_layers` have keys and values of others."""
    tied, shared = given.flag("attention_k_eq_v"), given.whole("num_kv_shared_layers", 0, least=0)
    first = len(kinds) - shared
    before = {kind: i for i, kind in enumerate(kinds[: max(first, 0)])}
    mixers = []
    for i, kind in enumerate(kinds):
        if i < first:
            mixers.append(Softmax(v_norm=True, tied_values=tied and kind == FULL, **sizes[i]))
            continue
        source = before.get(kind)
        if source is None or sizes[source] != sizes[i]:
            raise ConfigError(
                f"config.json: num_kv_shared_layers is {shared}, so that layer {i} ({kind}) has keys of the last such "
                f"layer before layer {first}, and there is none of its sizes"
            )
        mixers.append(Softmax(kv_from=source))
    return mixers


def _read(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    layers = fields["layers"]
    kinds = read_kinds(given, layers, lambda n: [*every(6, -1)(n)[:-1], FULL])
    if kinds[-1] != FULL:
        raise ConfigError(f"config.json: layer_types ends with {kinds[-1]}, and transformers makes it {FULL}")
    sizes, columns = _sizes(given, kinds, fields), given.whole(COLUMNS, least=0)
    if columns and given.whole(VOCAB) != fields["vocab"]:
        raise ConfigError(
            f"config.json: {VOCAB} {given.get(VOCAB)} and vocab_size {fields['vocab']}: headway has one vocab for both"
        )
    wide = given.flag("use_double_wide_mlp")
    mixers = _mixers(given, kinds, sizes)
    rope = {**given.config, "rope_parameters": given.get("rope_parameters") or ROPE}
    head_dims = {kind: own["head_dim"] for kind, own in zip(kinds, sizes, strict=True)}
    return {
        "patterns": read_windows(given, kinds),
        "mixers": mixers,
        "layer_hidden": tuple(0 if m.kv_from is None or not wide else 2 * fields["hidden"] for m in mixers),
        "per_layer_embedding": columns,
        **read_rope_by_kind(ConfigReader(rope, {}), kinds, {SLIDING: fields["head_dim"], **head_dims}, BASES),
        **scaled_embedding(fields),
    }


def _write(spec: ModelSpec) -> dict[str, Any]:
    keys = write_by_kind(spec, BASES)
    keys = {
        key: value
        for key, value in keys.items()
        if key not in ("rope_theta", "rope_scaling", BASES[SLIDING][0])
    }
    kinds = keys["layer_types"]
    if len({*zip(kinds, spec.key_sizes, strict=True)}) > len({*kinds}):
        raise Inexpressible("mixers")
    softmax = [mixer for mixer in spec.mixers if isinstance(mixer, Softmax)]
    sizes = {
        str(i): {"head_dim": head_dim, "num_key_value_heads": kv_heads}
        for i, (kv_heads, head_dim) in enumerate(spec.key_sizes)
    }
    return {
        **keys,
        "per_layer_config": sizes,
        "attention_k_eq_v": any(mixer.tied_values for mixer in softmax),
        "num_kv_shared_layers": sum(mixer.kv_from is not None for mixer in softmax),
        "use_double_wide_mlp": any(spec.layer_hidden),
        COLUMNS: spec.per_layer_embedding,
        VOCAB: spec.vocab,
    }


PLACES = {
    "model.per_layer.embed_tokens.": "model.embed_tokens_per_layer.",
    "model.per_layer.proj.": "model.per_layer_model_projection.",
    "model.per_layer.norm.": "model.per_layer_projection_norm.",
    ".per_layer.gate.": ".per_layer_input_gate.",
    ".per_layer.proj.": ".per_layer_projection.",
    ".per_layer.norm.": ".post_per_layer_input_norm.",
}
"""Parts of our names -> theirs."""


def _rules(spec: ModelSpec) -> list[Rule]:
    rules = []
    for name in own_shapes(spec):
        ours = next((part for part in PLACES if part in name), "")
        rules.append(same(name, name.replace(ours, PLACES[ours]) if ours else name))
    return rules


GEMMA4 = Layout(
    family="gemma4_text",
    architectures={"Gemma4ForCausalLM": "lm"},
    keys={**gemma_keys("hidden_activation", 4), "logit_cap": NO_CAPS["logit_cap"]},
    more={
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        COLUMNS: 256,
        VOCAB: 262144,
        **dict.fromkeys(("layer_types", "rope_parameters", "per_layer_config", "global_head_dim")),
        **dict.fromkeys(("num_global_key_value_heads", "attention_k_eq_v", "num_kv_shared_layers")),
        "use_double_wide_mlp": None,
    },
    only={
        "use_bidirectional_attention": (None, "vision"),  # of images
        "enable_moe_block": (False, None),
        **dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size"), (None,)),
    },
    read=_read,
    write=_write,
    tensors=replace(
        OWN_NAMES,
        rules=_rules,
        # published files have them in layers that attend to others' keys, too
        unused=(*OWN_NAMES.unused, *(f".self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm"))),
    ),
)
