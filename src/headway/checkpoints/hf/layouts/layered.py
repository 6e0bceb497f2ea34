"""Families whose layers differ in windows or in positions, as `transformers` stores them, most under LLaMA's names.

SmolLM3 (Bakouch et al. 2025; Yang et al. 2025, section 3.2) has layers without positions. EXAONE 4 (LG AI 2025), which
has only post-norms (of the outputs of sub-layers), and Cohere 2 have no positions in layers without windows. CWM (Meta
2025) has windows in three of four layers. Command R, R+ and A, and Aya (Cohere 2024, 2025) have parallel attention and
feed-forward after one LayerNorm without a bias, adjacent pairs, and scaled logits.

EXAONE 3 and 3.5, as transformers stores them from 5.24 on (LG AI Research 2024), are LLaMA under names like GPT-2's;
published files, which predate that and came with code of their own, have three keys under older names.
"""

from collections.abc import Mapping
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader, Key, activation
from headway.checkpoints.hf.layouts.base import Part
from headway.checkpoints.hf.layouts.llama import BIAS, FREE, MLP_BIAS, llama_layout
from headway.checkpoints.hf.layouts.llama_kin import REMOTE
from headway.checkpoints.hf.layouts.parts import in_windows, stated
from headway.checkpoints.hf.layouts.rules import block, decoder_names
from headway.checkpoints.hf.windows import LAYER_TYPES, PERIOD, UNUSED, every
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.patterns import Causal
from headway.positions import NoPositions, PerLayer, Rotary


def _marks(config: ConfigReader, layers: int) -> list[int]:
    """Returns whether each layer of a smollm3 has rotary positions."""
    marks = config.get("no_rope_layers")
    if marks is None:
        every = config.whole("no_rope_layer_interval")
        marks = [int((i + 1) % every != 0) for i in range(layers)]
    if not isinstance(marks, list) or len(marks) < layers or not all(mark in (0, 1) for mark in marks):
        raise config.wrong(
            "no_rope_layers", f"a list of 1 (rotary) or 0 (no positions) for {layers} layers", marks
        )
    return marks[:layers]


def _windows_without_positions(config: ConfigReader, layers: int) -> list[str]:
    windowed = config.flag("use_sliding_window") and config.get("sliding_window") is not None
    # index False is full attention, True a window
    return [LAYER_TYPES[windowed and not mark] for mark in _marks(config, layers)]


def _read_smollm3(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    marks = _marks(config, fields["layers"])
    return {"positions": PerLayer.of([fields["positions"] if mark else NoPositions() for mark in marks])}


SMOLLM3 = llama_layout(
    *("smollm3", "SmolLM3ForCausalLM", "late", 32768),
    {**BIAS, **MLP_BIAS, "tied": Key("tie_word_embeddings", True)},
    kv_heads=4,
    head_dim=FREE,
    more={"rope_theta": 2e6, "sliding_window": None},
    usual=_windows_without_positions,
    parts=(
        Part(
            {"no_rope_layers": None, "no_rope_layer_interval": 4},
            _read_smollm3,
            lambda spec: {
                "no_rope_layers": [int(isinstance(scheme, Rotary)) for scheme in spec.layer_positions]
            },
        ),
    ),
)


OLDER = {
    "layers": ("num_hidden_layers", "num_layers"),
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon"),
    "activation": ("hidden_act", "activation_function"),
}
"""Fields, and the names of their keys, today's first."""


def _read_exaone(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    keys = {}
    for field, (new, old) in OLDER.items():
        keys[field] = old if config.get(new) is None else new
        if config.get(old) not in (None, config.get(keys[field])):
            raise ConfigError(
                f"config.json: {new} is {config.get(new)}, but its older name {old} is {config.get(old)}; remove one"
            )
    return {
        "layers": config.whole(keys["layers"]),
        "norm_eps": config.number(keys["norm_eps"], 1e-5),
        "activation": activation(config, keys["activation"], "silu"),
        "patterns": Causal(),
    }


def _write_exaone(spec: ModelSpec) -> dict[str, Any]:
    return {new: getattr(spec, field) for field, (new, _) in OLDER.items()}


EXAONE = llama_layout(
    *("exaone", "LlamaForCausalLM", None, 4096),
    {**BIAS, **MLP_BIAS},
    kv_heads=8,
    without=tuple(OLDER),
    more={"rope_theta": 5e5},
    only={"embed_dropout": (0.0, None)},
    harmless=REMOTE,
    parts=(
        Part(dict.fromkeys(name for pair in OLDER.values() for name in pair), _read_exaone, _write_exaone),
    ),
    tensors=decoder_names(
        "transformer.",
        "transformer.wte",
        "transformer.ln_f",
        "transformer.h.#.",
        block("ln_1 ln_2", "attn.attention. q_proj k_proj v_proj out_proj", "mlp. c_fc_0 c_fc_1 c_proj"),
    ),
)


def _usual_exaone4(config: ConfigReader, layers: int) -> list[str]:
    if config.get("sliding_window") is None:
        raise ConfigError(
            "config.json: an exaone4 without sliding_window needs layer_types, as in transformers"
        )
    return every(config.whole(PERIOD), -1)(config, layers)


def _read_exaone4(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads positions: rotary in all layers if there are no windows, else only in layers with windows."""
    return {} if config.get("sliding_window") is None else in_windows(config, fields)


EXAONE4 = llama_layout(
    *("exaone4", "Exaone4ForCausalLM", "layer", 2048),
    kv_heads=32,
    head_dim=FREE,
    more={PERIOD: 4},
    usual=_usual_exaone4,
    parts=(Part(read=_read_exaone4),),
)
CWM = llama_layout(
    *("cwm", "CwmForCausalLM", "layer", 131072, {**MLP_BIAS, "norm_eps": Key("rms_norm_eps", 1e-5)}),
    kv_heads=8,
    head_dim=Key("head_dim", 128),
    more={"sliding_window": 8192, "rope_theta": 1e6},
    usual=every(4),
    unused=UNUSED,
    parts=(stated("cwm"),),
    ids=("bos_token_id",),
)
COHERE_KEYS = {
    **BIAS,
    "tied": Key("tie_word_embeddings", True),
    "norm_eps": Key("layer_norm_eps", 1e-5),
    "logit_scale": Key("logit_scale", 0.0625),
}
COHERE = llama_layout(
    *("cohere", "CohereForCausalLM", "none", 8192, COHERE_KEYS),
    head_dim=FREE,
    heads_divide=True,
    more={"rope_theta": 5e5},
    only={"use_qk_norm": (False, None)},
    harmless=("model_max_length",),
    pairing="adjacent",
)


def _read_cohere2(config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    every = config.whole(PERIOD, 4)
    if config.get("layer_switch") not in (None, every):
        raise ConfigError(
            f"config.json: layer_switch is {config.get('layer_switch')}, but every {every}th layer is full "
            "(sliding_window_pattern), which transformers uses; remove layer_switch"
        )
    if fields["heads"] * fields["head_dim"] != fields["width"]:
        raise ConfigError(
            f"config.json: head_dim is {fields['head_dim']}, but transformers computes it as hidden_size "
            f"{fields['width']} / num_attention_heads {fields['heads']}; make them agree"
        )
    return in_windows(config, fields)


COHERE2 = llama_layout(
    *("cohere2", "Cohere2ForCausalLM", "layer", 8192, COHERE_KEYS),
    heads_divide=True,
    usual=every(4, -1, key=PERIOD),
    parts=(Part(dict.fromkeys(("layer_switch", PERIOD)), _read_cohere2),),
    only={
        # keys of Cohere's own code; transformers supports only these values
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("rope_gptj",),
        "rotary_pct": (1,),
        **dict.fromkeys(("use_embedding_sharing", "use_gated_activation", "use_parallel_block"), (True,)),
        "use_qk_norm": (False, None),
    },
    harmless=("use_parallel_embedding", "cache_implementation"),
    pairing="adjacent",
)
