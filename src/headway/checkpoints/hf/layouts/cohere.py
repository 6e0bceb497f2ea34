"""Command R, R+ and A, and Aya, as `transformers` stores them (Cohere 2024, 2025): attention and feed-forward side by
side behind one LayerNorm without a bias, adjacent pairs, and scaled logits. Cohere 2 has windows with rotary positions
in three of four layers, and neither in the fourth (Yang et al. 2025, section 3.2)."""

from collections.abc import Mapping
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader, Key
from headway.checkpoints.hf.layer_types import LAYER_TYPES
from headway.checkpoints.hf.layouts.llama import (
    BIAS,
    FREE,
    llama_layout,
    read_windows,
)
from headway.errors import ConfigError
from headway.patterns import Causal
from headway.positions import NoPositions, PerLayer

KEYS = {
    **BIAS,
    "norm_eps": Key("layer_norm_eps", 1e-5),
    "logit_scale": Key("logit_scale", 0.0625),
    "tied": Key("tie_word_embeddings", True),
}
COHERE = llama_layout(
    *("cohere", "CohereForCausalLM", "none", 8192),
    KEYS,
    head_dim=FREE,
    heads_divide=True,
    more={"rope_theta": 5e5},
    only={"use_qk_norm": (False, None)},
    harmless=("model_max_length",),
    pairing="adjacent",
)


def _read(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    every = given.whole("sliding_window_pattern", 4)
    if given.get("layer_switch") not in (None, every):
        raise ConfigError(
            f"config.json: layer_switch is {given.get('layer_switch')}, but every {every}th layer is full "
            "(sliding_window_pattern), which is what transformers uses: remove it"
        )
    if fields["heads"] * fields["head_dim"] != fields["width"]:
        raise ConfigError(
            f"config.json: head_dim is {fields['head_dim']}, but transformers makes it hidden_size {fields['width']} / "
            f"{fields['heads']} heads"
        )
    usual = [LAYER_TYPES[(i + 1) % every > 0] for i in range(fields["layers"])]
    patterns = read_windows(given, "layer", fields["layers"], usual)
    rotary = [NoPositions() if pattern == Causal() else fields["positions"] for pattern in patterns]
    return {"patterns": patterns, "positions": PerLayer.of(rotary)}


COHERE2 = llama_layout(
    *("cohere2", "Cohere2ForCausalLM", "layer", 8192),
    KEYS,
    heads_divide=True,
    more=dict.fromkeys(("layer_switch", "sliding_window_pattern")),
    only={
        # of Cohere's own code; transformers has no others
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("rope_gptj",),
        "rotary_pct": (1,),
        "use_embedding_sharing": (True,),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
        "use_qk_norm": (False, None),
    },
    harmless=("use_parallel_embedding", "cache_implementation"),
    pairing="adjacent",
    read=_read,
)
