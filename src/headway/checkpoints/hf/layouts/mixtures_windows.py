"""Mixtures of experts by sigmoids whose layers have windows and rotary positions, or neither, as `transformers` stores
them: AFMoE (Arcee 2025, Trinity) with a gate on what is attended to, Flint (RecursiveSI 2026) with sink logits."""

from collections.abc import Mapping
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader, Key
from headway.checkpoints.hf.layer_types import (
    FULL,
    SLIDING,
    UNUSED,
    every,
    in_windows,
    read_kinds,
    read_windows,
    window_keys,
)
from headway.checkpoints.hf.layouts.experts import STEPS, ExpertKeys, behind_first, expert_layout, renamed
from headway.checkpoints.hf.layouts.llama import BIAS
from headway.checkpoints.hf.layouts.llama_kin import REMOTE
from headway.checkpoints.hf.layouts.mixtures import NORMALIZED
from headway.checkpoints.hf.layouts.mixtures_kin import SHARED, SIGMOID
from headway.models import ModelSpec


def _read_afmoe(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    kinds = read_kinds(given, fields["layers"], every(given.whole("global_attn_every_n_layers"), -1))
    scale = fields["width"] ** 0.5 if given.flag("mup_enabled") else 1.0
    return {"embedding_scale": scale, **in_windows(read_windows(given, kinds), fields["positions"])}


def _write_afmoe(spec: ModelSpec) -> dict[str, Any]:
    return {"mup_enabled": spec.embedding_scale == spec.width**0.5, **window_keys(spec, UNUSED)}


AFMOE = expert_layout(
    *("afmoe", "AfmoeForCausalLM", "layer", 16384, {"norm_eps": Key("rms_norm_eps", 1e-5)}),
    ExpertKeys(
        others={"scale": "route_scale"},
        always=SIGMOID,
        shared="num_shared_experts",
        shared_by_count=True,
        sparse=behind_first(1, "num_dense_layers"),
        usual={"route_scale": 1.0, "num_shared_experts": 2},
    ),
    head_dim=Key("head_dim", 128),
    more={"sliding_window": 1024, "global_attn_every_n_layers": 4, "mup_enabled": None},
    only={
        # of Arcee's own code; transformers has no others
        **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), (1, None)),
        "route_norm": (True, None),
        "score_func": ("sigmoid", None),
    },
    harmless=("load_balance_coeff", "use_grouped_mm", *REMOTE),
    read=_read_afmoe,
    write=_write_afmoe,
    tensors=renamed(
        {
            **SHARED,
            ".gate.e_score_correction_bias": ".expert_bias",
            ".mlp.gate.": ".mlp.router.gate.",
            ".g_proj.": ".gate_proj.",
            "_feedforward_layernorm.": "_mlp_layernorm.",
        }
    ),
)


def _read_flint(given: ConfigReader, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    layers = fields["layers"]
    usual = [FULL if i < 2 or i % 4 == 1 or i == layers - 1 else SLIDING for i in range(layers)]
    kinds = read_kinds(given, layers, lambda count: usual)
    return in_windows(read_windows(given, kinds), fields["positions"])


FLINT = expert_layout(
    *("flint", "FlintForCausalLM", "layer", 262144, BIAS),
    ExpertKeys(
        others=NORMALIZED,
        always={"score": "sigmoid"},
        shared="shared_expert_intermediate_size",
        sparse=STEPS,
        aux=0.0005,
        usual={
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 1024,
            "mlp_only_layers": [0, 1],
        },
    ),
    kv_heads=4,
    head_dim=Key("head_dim", 128),
    more={"sliding_window": 513},
    read=_read_flint,
    write=lambda spec: window_keys(spec, UNUSED),
    tensors=renamed({".sink_logit": ".softmax_offset"}),
)
