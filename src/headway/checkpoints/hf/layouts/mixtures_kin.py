"""Mixtures of experts with a bias for choosing, sigmoid scores, groups or dense first layers, as `transformers` stores
them.

Ernie 4.5 (Baidu 2025), dots.llm1 (rednote 2025), GLM-4.5 (GLM team 2025), K-EXAONE (LG AI Research 2025), Solar Open
(Upstage 2026), Mellum 2 (JetBrains 2026), Hy3 (Tencent 2026). Files have matrices of each expert under our names;
several shared experts are stored as one.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headway.checkpoints.hf.config_keys import ConfigReader, Key
from headway.checkpoints.hf.layouts.experts import (
    LAYER,
    NORMALIZED,
    ExpertKeys,
    Sparse,
    behind_first,
)
from headway.checkpoints.hf.layouts.llama import BIAS, llama_layout
from headway.checkpoints.hf.layouts.llama_kin import REMOTE, TIED
from headway.checkpoints.hf.layouts.parts import IN_WINDOWS, rope_by_kind
from headway.checkpoints.hf.layouts.rules import Rule, lifted
from headway.checkpoints.hf.layouts.tensors import renamed
from headway.checkpoints.hf.rope import PARTIAL
from headway.checkpoints.hf.windows import FULL, PERIOD, SLIDING, UNUSED, every

SHARED = {".shared_expert.": ".shared_experts."}
GROUPS = {
    "normalized": "norm_topk_prob",
    "groups": "n_group",
    "top_groups": "topk_group",
    "scale": "routed_scaling_factor",
}
SIGMOID = {"score": "sigmoid", "choice_bias": True}
USUAL = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
DEEPSEEK = ExpertKeys(
    count=("n_routed_experts", "num_local_experts"),
    shared="n_shared_experts",
    shared_by_count=True,
    others=GROUPS,
    always=SIGMOID,
    usual={**USUAL, "norm_topk_prob": True},
)
"""The experts of DeepSeek-V3."""


def _read_interval(config: ConfigReader, layers: int) -> list[bool]:
    first, last, step = (config.get(f"moe_layer_{name}") for name in ("start_index", "end_index", "interval"))
    if not all(isinstance(n, int) for n in (first, last, step)) or step < 1:
        raise config.wrong(
            "moe_layer_interval", "a whole number above 0, and start and end index whole", (first, last, step)
        )
    last = layers - 1 if last == -1 else last
    return [first <= i <= last and (i + 1) % step == 0 for i in range(layers)]


def _write_interval(sparse: Sequence[bool]) -> dict[str, Any]:
    has = [i for i, is_sparse in enumerate(sparse) if is_sparse]
    step = has[1] - has[0] if len(has) > 1 else 1
    return {"moe_layer_start_index": has[0], "moe_layer_end_index": has[-1], "moe_layer_interval": step}


ERNIE45_MOE = llama_layout(
    *("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "none", 131072, TIED),
    experts=ExpertKeys(
        count=("moe_num_experts", "num_experts"),
        top="moe_k",
        shared="moe_num_shared_experts",
        shared_by_count=True,
        always={"choice_bias": True},
        sparse=Sparse(
            {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
            _read_interval,
            _write_interval,
        ),
        aux=0.001,
    ),
    kv_heads=4,
    more={"rope_theta": 5e5},
    without=("attention_dropout",),  # transformers ignores it
    only={"attention_dropout": (0.0, None), "use_bias": (False, None), "moe_norm_min": (1e-12, None)},
    harmless=REMOTE,
    pairing="adjacent",
    tensors=renamed(
        SHARED,
        lambda spec: [
            Rule(
                (f"{LAYER}mlp.gate.e_score_correction_bias",),
                f"{LAYER}mlp.moe_statics.e_score_correction_bias",
                changes=(lifted(0),),
            )
        ],
    ),
)


def _usual_dots(config: ConfigReader, layers: int) -> list[str]:
    first, windowed = config.whole("max_window_layers", least=0), config.get("sliding_window") is not None
    return [SLIDING if windowed and i >= first else FULL for i in range(layers)]


DOTS1 = llama_layout(
    *("dots1", "Dots1ForCausalLM", "layer", 2048, BIAS),
    experts=replace(DEEPSEEK, sparse=behind_first(0), usual=USUAL),
    kv_heads=32,
    more={"max_window_layers": 62},
    usual=_usual_dots,
    tensors=renamed(SHARED),
)
GLM4_MOE = llama_layout(
    *("glm4_moe", "Glm4MoeForCausalLM", "none", 131072),
    {"qkv_bias": Key("attention_bias"), "qk_norm": Key("use_qk_norm", False, {True: "head", False: "none"})},
    experts=replace(DEEPSEEK, sparse=behind_first(1)),
    kv_heads=8,
    more={PARTIAL: 0.5},
    harmless=("num_nextn_predict_layers", "num_mtp_layers", *REMOTE),
    rope=PARTIAL,
    tensors=renamed(SHARED, unused=("model.layers.46.", "model.layers.92.")),  # multi-token prediction
)


MLP_TYPES = ("dense", "sparse")


def by_kind(first: int) -> Sparse:
    """Returns the keys of experts in layers that `mlp_layer_types` calls sparse; without it, in all but the first few
    (`first_k_dense_replace`, or `first`)."""

    def read(config: ConfigReader, layers: int) -> Sequence[bool]:
        kinds = config.get("mlp_layer_types")
        if kinds is None:
            return behind_first(first).read(config, layers)
        known = isinstance(kinds, list) and all(kind in MLP_TYPES for kind in kinds)
        if not known or len(kinds) != layers:
            raise config.wrong("mlp_layer_types", f"a list of dense or sparse for {layers} layers", kinds)
        return [kind == "sparse" for kind in kinds]

    return Sparse(
        {"mlp_layer_types": None},
        read,
        lambda sparse: {"mlp_layer_types": ["sparse" if has else "dense" for has in sparse]},
    )


EXAONE_MOE = llama_layout(
    *("exaone_moe", "ExaoneMoeForCausalLM", "layer", 2048),
    experts=replace(
        DEEPSEEK,
        count=ExpertKeys.count,
        shared="num_shared_experts",
        sparse=by_kind(1),
        usual={**DEEPSEEK.usual, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1},
    ),
    kv_heads=32,
    more={PERIOD: 4},
    usual=every(4, -1, key=PERIOD),
    unused=UNUSED,
    parts=(IN_WINDOWS,),
    tensors=renamed({".gate.e_score_": ".e_score_", **SHARED}, unused=("mtp.",)),
)
SOLAR_OPEN = llama_layout(
    *("solar_open", "SolarOpenForCausalLM", "none", 131072),
    {"qkv_bias": Key("attention_bias")},
    experts=replace(DEEPSEEK, dense="moe_intermediate_size"),
    kv_heads=8,
    head_dim=Key("head_dim", 128),
    more={"rope_theta": 1e6},
    only={"first_k_dense_replace": (0, None), "use_qk_norm": (False, None)},
    harmless=("intermediate_size",),
    tensors=renamed(SHARED),
)
MELLUM = llama_layout(
    *("mellum", "MellumForCausalLM", "layer", 131072, BIAS),
    experts=ExpertKeys(others=NORMALIZED, sparse=by_kind(0), aux=0.001, usual={"norm_topk_prob": True}),
    kv_heads=4,
    head_dim=Key("head_dim", 128),
    usual=every(1),
    unused=UNUSED,
    more={"sliding_window": 1024},
    harmless=("num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
    rope=None,
    # without the keys of old files, on which transformers fails
    parts=(rope_by_kind({FULL: ("rope_theta", 5e5), SLIDING: ("rope_theta", 1e4)}, old=False),),
    tensors=renamed({}, unused=("mtp.",)),
)
HY_V3 = llama_layout(
    *("hy_v3", "HYV3ForCausalLM", "none", 131072),
    {**BIAS, "init_std": Key("initializer_range", 0.006), "norm_eps": Key("rms_norm_eps", 1e-5)},
    experts=ExpertKeys(
        shared="num_shared_experts",
        shared_by_count=True,
        others={"scale": "router_scaling_factor"},
        always=SIGMOID,
        sparse=by_kind(1),
        usual={"router_scaling_factor": 2.826},
    ),
    kv_heads=8,
    head_dim=Key("head_dim", 128),
    more={"rope_theta": 11158840.0},
    harmless=("enable_moe_fp32_combine",),
    tensors=renamed(
        {
            ".gate.e_score_correction_bias": ".expert_bias",
            ".mlp.gate.": ".mlp.router.gate.",
            ".shared_expert.": ".shared_mlp.",
        },
        unused=("model.layers.80.",),  # multi-token prediction
    ),
)
