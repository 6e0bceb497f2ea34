"""Gemma 1, 2, 3 and 4 (text), and VaultGemma, as `transformers` stores them (Gemma team 2024, 2024, 2025, 2026;
VaultGemma team 2025). Tensors of the first three have the same names as ours, except for one norm of VaultGemma.

Norms are x / |x| * (1 + w) with w stored, embeddings are multiplied by sqrt(M), the activation is GELU by tanh. Gemma 2
normalizes inputs and outputs of sub-layers, caps scores and logits, and has a window in every other layer; VaultGemma
normalizes only inputs; Gemma 3 normalizes queries and keys instead of the caps, and has a window, and a rotary base of
its own, in five of six layers.

In Gemma 4 (E2B, E4B and 31B), layers with full attention have another head size than those with windows, and rotate a
share of it; the last layers attend to the keys and values of the last layer of their kind that has its own, and may
have feed-forwards twice as wide. If `per_layer_config` does not state the sizes, `global_head_dim` and
`num_global_key_value_heads` do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headway.checkpoints.hf.config_keys import DECODER, ConfigReader, Inexpressible, Key
from headway.checkpoints.hf.layouts.base import Layout, Part
from headway.checkpoints.hf.layouts.parts import rope_by_kind, windows
from headway.checkpoints.hf.layouts.tensors import OWN_NAMES, renamed
from headway.checkpoints.hf.windows import (
    FULL,
    PERIOD,
    SLIDING,
    UNUSED,
    every,
    read_kinds,
    read_rope_by_kind,
    window_keys,
)
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.models.family import scaled_embedding
from headway.models.mixers import Softmax

CAUSAL = {"use_bidirectional_attention": (False, None)}
BASES = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}


def gemma_keys(activation: str, kv_heads: int) -> dict[str, Key]:
    """Returns the keys that all Gemmas share."""
    return {
        **DECODER,
        "kv_heads": Key("num_key_value_heads", kv_heads),
        "head_dim": Key("head_dim", 256),
        "activation": Key(activation, "gelu_pytorch_tanh"),
        "norm_eps": Key("rms_norm_eps", 1e-6),
        "tied": Key("tie_word_embeddings", True),
        "qkv_bias": Key("attention_bias"),
        "out_bias": Key("attention_bias"),
    }


def _read_scale(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the scale of scores: query_pre_attn_scalar^-0.5, in most models the inverse root of the head size."""
    number = config.whole("query_pre_attn_scalar")
    return {"attention_scale": None if number == fields["head_dim"] else number**-0.5}


def _write_scale(spec: ModelSpec) -> dict[str, Any]:
    scale = spec.attention_scale
    number = spec.head_dim if scale is None else round(scale**-2)
    if scale is not None and number**-0.5 != scale:
        raise Inexpressible("attention_scale")
    return {"query_pre_attn_scalar": number}


def _tanh(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the activation of Gemma's first files, which say "gelu" but were trained with its tanh approximation."""
    return {"activation": "gelu_pytorch_tanh"} if fields["activation"] == "gelu" else {}


SCALE = Part({"query_pre_attn_scalar": 256}, _read_scale, _write_scale)
EMBEDDING = Part(read=lambda config, fields: dict(scaled_embedding(fields)))
CAPS = {
    "score_cap": Key("attn_logit_softcapping", 50.0),
    "logit_cap": Key("final_logit_softcapping", 30.0),
}
NO_CAPS = {field: key._replace(default=None) for field, key in CAPS.items()}
GEMMA = Layout(
    family="gemma",
    architectures={"GemmaForCausalLM": "lm"},
    keys=gemma_keys("hidden_act", 16),
    more={"max_position_embeddings": 8192},
    only={**CAUSAL, "hidden_activation": ("gelu_pytorch_tanh", None)},
    rope="",
    parts=(EMBEDDING, Part(read=_tanh)),
    tensors=OWN_NAMES,
)
GEMMA2 = Layout(
    family="gemma2",
    architectures={"Gemma2ForCausalLM": "lm"},
    keys={**gemma_keys("hidden_activation", 4), **CAPS},
    more={"max_position_embeddings": 8192},
    only={**CAUSAL, "hidden_act": ("gelu_pytorch_tanh", None)},
    harmless=("cache_implementation",),
    rope="",
    parts=(windows("layer", every(2, 1), unused=UNUSED), EMBEDDING, SCALE),
    tensors=OWN_NAMES,
)
VAULTGEMMA = replace(
    GEMMA2,
    family="vaultgemma",
    architectures={"VaultGemmaForCausalLM": "lm"},
    only={},
    tensors=renamed({".post_attention_layernorm.": ".pre_feedforward_layernorm."}),
)
GEMMA3 = Layout(
    family="gemma3_text",
    architectures={"Gemma3ForCausalLM": "lm"},
    keys={**gemma_keys("hidden_activation", 4), **NO_CAPS},
    more={"max_position_embeddings": 131072, PERIOD: None},
    only=CAUSAL,
    harmless=("cache_implementation", "_sliding_window_pattern"),
    parts=(
        windows("layer", every(6, -1, key=PERIOD), unused=UNUSED),
        rope_by_kind(BASES),
        EMBEDDING,
        SCALE,
    ),
    tensors=OWN_NAMES,
)


POSITIONS = rope_by_kind(BASES, old=False)
ROPE4: Mapping[str, Mapping[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
COLUMNS, VOCAB = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
SIZES = {"head_dim": "head_dim", "kv_heads": "num_key_value_heads"}
"""Fields of `Softmax` and their keys in `per_layer_config`."""


def _sizes(config: ConfigReader, kinds: Sequence[str], fields: Mapping[str, Any]) -> list[dict[str, int]]:
    """Returns `head_dim` and `kv_heads` of each layer."""
    layer_configs, tied = config.get("per_layer_config"), config.flag("attention_k_eq_v")
    if layer_configs is None:
        wide = {"head_dim": config.whole("global_head_dim", 512)}
        if tied and config.get("num_global_key_value_heads") is not None:
            wide["num_key_value_heads"] = config.whole("num_global_key_value_heads")
        layer_configs = {str(i): wide for i, kind in enumerate(kinds) if kind == FULL}
    numbers = {str(i) for i in range(len(kinds))}
    if not isinstance(layer_configs, Mapping) or not all(
        str(i) in numbers and isinstance(sizes, Mapping) and {*sizes} <= {*SIZES.values()}
        for i, sizes in layer_configs.items()
    ):
        raise config.wrong(
            "per_layer_config", f"an object of layers with {' and '.join(SIZES.values())}", layer_configs
        )
    by_layer = [ConfigReader(layer_configs.get(str(i), {}), {}) for i in range(len(kinds))]
    return [{name: reader.whole(key, fields[name]) for name, key in SIZES.items()} for reader in by_layer]


def softmax_by_layer(
    config: ConfigReader,
    kinds: Sequence[str],
    sizes: Sequence[Mapping[str, Any]],
    shared: int,
    tied: bool = False,
) -> list[Softmax]:
    """Returns the attention of each layer: the last `shared` layers use keys and values of an earlier one. Raises
    ConfigError if no earlier layer has the same kind and sizes."""
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
                f"config.json: num_kv_shared_layers is {shared}, so layer {i} ({kind}) shares keys of the last {kind} "
                f"layer before layer {first}, but there is none of the same sizes"
            )
        mixers.append(Softmax(kv_from=source))
    return mixers


def _usual(config: ConfigReader, layers: int) -> list[str]:
    return [*every(6, -1)(config, layers)[:-1], FULL]


def _read4(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    kinds = read_kinds(config, fields["layers"], _usual)
    if kinds[-1] != FULL:
        raise ConfigError(
            f"config.json: layer_types must end with {FULL}, which transformers enforces; got {kinds[-1]}"
        )
    sizes, columns = _sizes(config, kinds, fields), config.whole(COLUMNS, least=0)
    if columns and config.whole(VOCAB) != fields["vocab"]:
        raise ConfigError(
            f"config.json: {VOCAB} {config.get(VOCAB)} and vocab_size {fields['vocab']} must be equal"
        )
    wide = config.flag("use_double_wide_mlp")
    shared = config.whole("num_kv_shared_layers", 0, least=0)
    mixers = softmax_by_layer(config, kinds, sizes, shared, config.flag("attention_k_eq_v"))
    rope = {**config.config, "rope_parameters": config.get("rope_parameters") or ROPE4}
    head_dims = {kind: size["head_dim"] for kind, size in zip(kinds, sizes, strict=True)}
    return {
        "mixers": mixers,
        "layer_hidden": tuple(0 if m.kv_from is None or not wide else 2 * fields["hidden"] for m in mixers),
        "per_layer_embedding": columns,
        **read_rope_by_kind(ConfigReader(rope, {}), kinds, {SLIDING: fields["head_dim"], **head_dims}, BASES),
    }


def _write4(spec: ModelSpec) -> dict[str, Any]:
    kinds = window_keys(spec)["layer_types"]
    if len({*zip(kinds, spec.key_sizes, strict=True)}) > len({*kinds}):
        raise Inexpressible("mixers")
    softmax = [mixer for mixer in spec.mixers if isinstance(mixer, Softmax)]
    sizes = {
        str(i): {"head_dim": head_dim, "num_key_value_heads": kv_heads}
        for i, (kv_heads, head_dim) in enumerate(spec.key_sizes)
    }
    return {
        **POSITIONS.write(spec),
        "per_layer_config": sizes,
        "attention_k_eq_v": any(mixer.tied_values for mixer in softmax),
        "num_kv_shared_layers": sum(mixer.kv_from is not None for mixer in softmax),
        "use_double_wide_mlp": any(spec.layer_hidden),
        COLUMNS: spec.per_layer_embedding,
        VOCAB: spec.vocab,
    }


KEYS = {
    COLUMNS: 256,
    VOCAB: 262144,
    **dict.fromkeys(("rope_parameters", "per_layer_config", "global_head_dim", "use_double_wide_mlp")),
    **dict.fromkeys(("num_global_key_value_heads", "attention_k_eq_v", "num_kv_shared_layers")),
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
UNUSED_KEYS = tuple(f".self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm"))
"""Tensors that published files have also in layers that attend to other layers' keys."""


GEMMA4 = Layout(
    family="gemma4_text",
    architectures={"Gemma4ForCausalLM": "lm"},
    keys={**gemma_keys("hidden_activation", 4), "logit_cap": NO_CAPS["logit_cap"]},
    more={"max_position_embeddings": 131072, "sliding_window": 512},
    only={
        "use_bidirectional_attention": (None, "vision"),  # "vision": only among image tokens
        "enable_moe_block": (False, None),
        **dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size"), (None,)),
    },
    parts=(windows("layer", _usual, unused=UNUSED), Part(KEYS, _read4, _write4), EMBEDDING),
    tensors=renamed(PLACES, unused=UNUSED_KEYS),
)
