"""The architectures of GGUF, as data: the metadata keys below an architecture's name, and the names of its tensors.

Queries and keys of "llama" and similar architectures are in adjacent pairs, as in Meta's own files, those of the others
in halves. A window in all layers (Mistral) is the key attention.sliding_window, which llama.cpp ignores in these
architectures: it attends to all keys, which is the same for sequences of up to that many tokens. Which layers have no
positions (SmolLM3, Cohere 2), and which have a window (Cohere 2, Gemma 2 and 3, OLMo 3), need not be stored: by default
every n-th layer differs. Gemma's norms are stored as 1 + w (`model.py`).
(ggml-org/ggml, docs/gguf.md; ggml-org/llama.cpp, src/llama-model.cpp, src/models, conversion.)
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.checkpoints.formats.gguf.experts import expert_keys
from headway.checkpoints.formats.gguf.gemma import (
    GEMMAS,
    LOCAL_BASE,
    POST,
    SANDWICH,
    local_base,
    write_local_base,
)
from headway.checkpoints.formats.gguf.layout import BIASES, HEAD_DIMS, LAYER, RMS, gguf_layout
from headway.checkpoints.formats.gguf.mixers import (
    CONV,
    DELTA_3_5,
    DELTA_NEXT,
    KV_HEADS,
    SSD,
    SSD_ALONE,
    SSD_BESIDE,
)
from headway.checkpoints.formats.gguf.nemotron_h import nemotron_h
from headway.checkpoints.hf.config_keys import ConfigReader, Key
from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.granite import NUMBERS
from headway.checkpoints.hf.layouts.rules import Rule
from headway.models import ModelSpec
from headway.positions import Learned, NoPositions, PositionScheme, Rotary, YaRN

SCALE, LOGIT_SCALE = "attention.scale", "logit_scale"


def nth_without(rotary: Rotary, keys: ConfigReader) -> tuple[PositionScheme, PositionScheme]:
    """Returns the positions of most layers, and none for every n-th."""
    return rotary, NoPositions()


def unless_full(rotary: Rotary, keys: ConfigReader) -> tuple[PositionScheme, PositionScheme]:
    """Returns the positions of most layers, and none for every n-th if the others have a window."""
    return rotary, NoPositions() if keys.get("attention.sliding_window") else rotary


def unless_tuned(rotary: Rotary, keys: ConfigReader) -> tuple[PositionScheme, PositionScheme]:
    """Returns no positions if rope.scaling.finetuned is false, else the same rotation for all layers."""
    scheme = NoPositions() if keys.get("rope.scaling.finetuned") is False else rotary
    return scheme, scheme


def untruncated(rotary: Rotary, keys: ConfigReader) -> tuple[PositionScheme, PositionScheme]:
    """Returns the rotation with YaRN's bounds not rounded (gpt-oss), for which there is no key."""
    if isinstance(rotary.scaling, YaRN):
        rotary = replace(rotary, scaling=replace(rotary.scaling, truncate=False))
    return rotary, rotary


def read_granite(keys: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the factor on attention scores, and the divisor of logits."""
    scale, default = keys.number(SCALE, 0.0), fields["head_dim"] ** -0.5
    near = abs(scale - default) <= 1e-6 * default  # the file's value was rounded to float32
    return {
        "attention_scale": scale if scale and not near else None,
        "logit_scale": 1 / (keys.number(LOGIT_SCALE, 0.0) or 1.0),
    }


def write_granite(spec: ModelSpec) -> dict[str, Any]:
    """Returns the keys that `read_granite` reads."""
    numbers = NUMBERS.write(spec)
    return {SCALE: numbers["attention_multiplier"], LOGIT_SCALE: numbers["logits_scaling"]}


LOGITS = {"logit_scale": Key(LOGIT_SCALE)}
PARALLEL = "use_parallel_residual"
QKV, GATE_UP = {"self_attn.qkv_proj": "attn_qkv"}, {"mlp.gate_up_proj": "ffn_up"}
LLAMAS = ("mixtral", "mistral", "ministral", "internlm3", "iquestcoder", "helium")
GRANITE: Mapping[str, Any] = {
    "numbers": {name: Key(name, 1.0) for name in ("embedding_scale", "residual_scale")},
    "more": (SCALE, LOGIT_SCALE),
    "further": read_granite,
    "written": write_granite,
}
BEHIND: Mapping[str, Any] = {"modules": {"post_attention_layernorm": "post_attention_norm"}}
"""Architectures that name the norm before the feed-forward by its place after attention."""
GATED = expert_keys({"shared_gate": True}, shared=True)
QWEN3_5: Mapping[str, Any] = {
    **BEHIND,
    "mixing": DELTA_3_5,
    # pairs for each of the three coordinates of an image patch, which are equal for text tokens
    "written": lambda spec: {"rope.dimension_sections": [11, 11, 10, 0]},
    "harmless": ("rope.dimension_sections",),
}
NORM_BEFORE = [Rule(("model.layers.#.post_attention_layernorm.weight",), "blk.#.ffn_norm")]
TABLE: Mapping[str, Any] = {
    "top": {"model.embed_positions": "position_embd"},
    "further": lambda keys, fields: {"positions": Learned(fields["trained_context"])},
}
ARCHITECTURES: Mapping[str, Layout] = {
    "llama": gguf_layout("llama", "adjacent", BIASES, also=LLAMAS, experts=expert_keys()),
    "qwen2": gguf_layout("qwen2", "halves", ("qkv_bias",)),
    "qwen3": gguf_layout("qwen3", "halves"),
    "qwen3moe": gguf_layout("qwen3moe", "halves", family="qwen3_moe", experts=expert_keys()),
    "qwen2moe": gguf_layout(
        *("qwen2moe", "halves", ("qkv_bias",)),
        family="qwen2_moe",
        experts=expert_keys({"normalized": False, "shared_gate": True}, shared=True),
    ),
    "olmoe": gguf_layout("olmoe", "halves", experts=expert_keys({"normalized": False})),
    "gpt-oss": gguf_layout(
        *("gpt-oss", "halves"),
        family="gpt_oss",
        every=2,
        schemes=untruncated,
        experts=expert_keys({"router_bias": True}),
        **BEHIND,
    ),
    "smollm3": gguf_layout("smollm3", "adjacent", every=4, schemes=nth_without),
    "ernie4_5": gguf_layout("ernie4_5", "adjacent"),
    "seed_oss": gguf_layout("seed_oss", "halves", ("qkv_bias",), **BEHIND),
    "command-r": gguf_layout(
        *("command-r", "adjacent"), family="cohere", eps=LAYER, numbers=LOGITS, tied=True
    ),
    "cohere2": gguf_layout(
        *("cohere2", "adjacent"), eps=LAYER, numbers=LOGITS, tied=True, every=4, schemes=nth_without
    ),
    "granite": gguf_layout(*("granite", "adjacent", BIASES), schemes=unless_tuned, **GRANITE),
    "granitemoe": gguf_layout(
        *("granitemoe", "adjacent"),
        schemes=unless_tuned,
        experts=expert_keys(shared=True),
        also=("granitemoeshared",),
        **GRANITE,
    ),
    "granitehybrid": gguf_layout(
        *("granitehybrid", "adjacent"),
        family="granitemoehybrid",
        schemes=unless_tuned,
        experts=expert_keys(shared=True),
        mixing=SSD,
        also=("bamba",),
        **GRANITE,
    ),
    "falcon-h1": gguf_layout(
        "falcon-h1", "halves", family="falcon_h1", mixing=SSD_BESIDE, tensors=NORM_BEFORE
    ),
    "nemotron_h_moe": nemotron_h("nemotron_h_moe", sparse=True),
    "nemotron_h": nemotron_h("nemotron_h", sparse=False),
    "mamba2": gguf_layout(
        *("mamba2", None),
        numbers={"heads": Key("ssm.time_step_rank"), "hidden": Key((), lambda fields: 0)},
        only={"attention.head_count": (0,), "feed_forward_length": (0,)},
        mixing=SSD_ALONE,
        further=lambda keys, fields: {
            "head_dim": keys.whole("ssm.inner_size") // fields["heads"],
            "kv_heads": fields["heads"],
            "positions": NoPositions(),
        },
        written=lambda spec: dict.fromkeys((KV_HEADS, *HEAD_DIMS)),
    ),
    "lfm2": gguf_layout("lfm2", "halves", top={"model.norm": "token_embd_norm"}, mixing=CONV),
    "lfm2moe": gguf_layout(
        *("lfm2moe", "halves"),
        family="lfm2_moe",
        top={"model.norm": "token_embd_norm"},
        only={"expert_gating_func": (2,)},  # sigmoids
        experts=expert_keys({"score": "sigmoid", "choice_bias": True, "sum_eps": 1e-6}, lead=True),
        mixing=CONV,
    ),
    "qwen3next": gguf_layout(
        *("qwen3next", "halves"), family="qwen3_next", experts=GATED, mixing=DELTA_NEXT, **BEHIND
    ),
    "qwen35": gguf_layout("qwen35", "halves", family="qwen3_5_text", **QWEN3_5),
    "qwen35moe": gguf_layout(
        *("qwen35moe", "halves"),
        family="qwen3_5_moe_text",
        numbers={"hidden": Key("feed_forward_length", 1)},  # no layer has a dense feed-forward
        experts=GATED,
        **QWEN3_5,
    ),
    "olmo": gguf_layout("olmo", "adjacent", eps=LAYER),
    "olmo2": gguf_layout(
        *("olmo2", "halves"),
        modules=POST,
        tied=False,
        every=4,
        schemes=local_base(None),
        more=(LOCAL_BASE,),
        written=write_local_base,
        also=("olmo3",),
    ),
    **GEMMAS,
    "phi3": gguf_layout("phi3", "halves", modules={**QKV, **GATE_UP}),
    "chatglm": gguf_layout("chatglm", "adjacent", ("qkv_bias",), family="glm", modules=GATE_UP),
    "glm4": gguf_layout("glm4", "adjacent", ("qkv_bias",), modules={**SANDWICH, **GATE_UP}),
    "arcee": gguf_layout("arcee", "adjacent"),
    "jais2": gguf_layout("jais2", "halves", eps=LAYER),
    "nemotron": gguf_layout("nemotron", "halves", eps=LAYER, harmless=(RMS,)),
    "hunyuan-dense": gguf_layout("hunyuan-dense", "halves", family="hunyuan_v1_dense"),
    "exaone4": gguf_layout("exaone4", "halves", modules=POST, every=4, schemes=unless_full),
    "minimax-m2": gguf_layout(
        *("minimax-m2", "halves"),
        family="minimax_m2",
        only={"expert_gating_func": (2,)},
        experts=expert_keys({"score": "sigmoid", "choice_bias": True}),
    ),
    "stablelm": gguf_layout(
        *("stablelm", "halves", ("qkv_bias",)), eps=LAYER, tied=False, only={PARALLEL: (False,)}
    ),
    "starcoder2": gguf_layout("starcoder2", "halves", eps=LAYER),
    "phi2": gguf_layout("phi2", "halves", family="phi", eps=LAYER, tied=False),
    "gptneox": gguf_layout(
        *("gptneox", "halves"),
        family="gpt_neox",
        eps=LAYER,
        numbers={"order": Key(PARALLEL, True, {False: "pre", True: "parallel"})},
        modules=QKV,
        tied=False,
    ),
    "falcon": gguf_layout("falcon", "halves", eps=LAYER, modules=QKV),
    "gpt2": gguf_layout("gpt2", None, eps=LAYER, modules=QKV, **TABLE),
    "starcoder": gguf_layout("starcoder", None, family="gpt_bigcode", eps=LAYER, modules=QKV, **TABLE),
    "bloom": gguf_layout(
        *("bloom", None), eps=LAYER, modules=QKV, top={"model.embed_norm": "token_embd_norm"}
    ),
    "mpt": gguf_layout(*("mpt", None), eps=LAYER, modules=QKV, only={"attention.max_alibi_bias": (8.0,)}),
}
