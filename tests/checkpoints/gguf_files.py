"""Shared by the GGUF tests: small specs of each architecture, and their weights with random norms and biases."""

from dataclasses import replace

import torch

from headway.attention.delta import DeltaSpec, SSDSpec
from headway.models import FAMILIES, ModelSpec, build
from headway.models.mixers import Softmax
from headway.nn import Experts, ShortConv
from headway.patterns import Causal, Window
from headway.positions import (
    Learned,
    LinearScaling,
    Llama3,
    LongRope,
    NoPositions,
    PerLayer,
    Proportional,
    Rotary,
    YaRN,
    in_pairing,
)

BASE = {"vocab": 70, "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "hidden": 96}


def rotary(pairing, theta=10000.0, scaling=None):
    return {"positions": Rotary(theta, pairing=pairing, scaling=scaling)}


FOUR, NOPE = {**BASE, "layers": 4}, FAMILIES["smollm3"].defaults["positions"]
SQUARE = {**BASE, "head_dim": 16}
ALIKE, TABLE = {**SQUARE, "kv_heads": 4, "hidden": 256}, {"positions": Learned(64), "trained_context": 64}
LOCAL = Rotary(5e5, pairing="halves")
SHARED = Experts(count=4, top=2, shared=40, shared_gate=True)
GRANITE = {
    "embedding_scale": 12.0,
    "residual_scale": 0.21875,
    "attention_scale": 0.078125,
    "logit_scale": 0.125,
}
SSD = SSDSpec(heads=8, key_heads=2, head_dim=16, value_dim=16)
DELTA = DeltaSpec(heads=4, key_heads=2, head_dim=16)
HYBRID = {**SQUARE, "layers": 4}
QWEN = {**BASE, "layers": 4, "mixers": (*(DELTA,) * 3, Softmax())}
CONV = {**SQUARE, "layers": 3, "mixers": (ShortConv(), ShortConv(), Softmax())}
NEMOTRON = {**BASE, "layers": 4, "mixers": (SSD, SSD, Softmax(), SSD)}
NANO = Experts(
    count=4, top=2, hidden=48, shared=40, score="sigmoid", choice_bias=True, sum_eps=1e-20, scale=2.5
)
OFTEN = (*(*(Window.last(6),) * 4, Causal()) * 4, Window.last(6), Causal())
THREE_N = {
    **BASE,
    "layers": 22,
    "patterns": OFTEN,
    "positions": PerLayer(
        tuple(Rotary(1e6 if pattern == Causal() else 1e4, pairing="halves") for pattern in OFTEN)
    ),
    "per_layer_embedding": 256,
    "mlp_sparsity": (*(0.95,) * 10, *(0.0,) * 12),
    "mixers": (*(Softmax(v_norm=True),) * 20, Softmax(kv_from=18), Softmax(kv_from=19)),
}
TURNING = Rotary(1e6, pairing="halves", scaling=Proportional(0.25))
FOUR_E = {
    **BASE,
    "layers": 6,
    "patterns": (Window.last(6), Window.last(6), Causal()) * 2,
    "positions": PerLayer((Rotary(pairing="halves"), Rotary(pairing="halves"), TURNING)),
    "per_layer_embedding": 24,
    "layer_hidden": (0, 0, 0, *(192,) * 3),
    "mixers": (
        *(Softmax(v_norm=True),) * 2,
        Softmax(v_norm=True, head_dim=64),
        *(Softmax(kv_from=1),) * 2,
        Softmax(kv_from=2),
    ),
}
FOUR_DENSE = {
    **BASE,
    "layers": 6,
    "patterns": (*(Window.last(6),) * 5, Causal()),
    "positions": PerLayer((*(Rotary(pairing="halves"),) * 5, TURNING)),
    "mixers": (
        *(Softmax(v_norm=True),) * 5,
        Softmax(v_norm=True, head_dim=64, kv_heads=1, tied_values=True),
    ),
}
LLAMA31 = rotary("adjacent", 500000.0, Llama3(8.0, 1.0, 4.0, 8192))
SPECS = {
    "llama": ModelSpec.of("llama", **BASE, **rotary("adjacent"), norm_eps=1e-5),
    "llama, tied, with biases": ModelSpec.of(
        "llama",
        **BASE,
        **rotary("adjacent"),
        tied=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        init_std=0.3,
    ),
    "llama 3.1": ModelSpec.of("llama", **BASE, **LLAMA31, trained_context=131072),
    "llama, interpolated": ModelSpec.of("llama", **BASE, **rotary("adjacent", scaling=LinearScaling(4.0))),
    "llama, divided": ModelSpec.of(
        "llama",
        **BASE,
        **rotary("adjacent", scaling=LongRope((1.5,) * 16, (1.5,) * 16, 2048, attention_factor=1.0)),
    ),
    "mistral": ModelSpec.of("mistral", **BASE, **rotary("adjacent"), attention_dropout=0.1),
    "mistral, windows": ModelSpec.of("mistral", **BASE, **rotary("adjacent"), patterns=Window.last(16)),
    "qwen2": ModelSpec.of("qwen2", **BASE, **rotary("halves", 1e6)),
    "qwen2, yarn": ModelSpec.of(
        "qwen2",
        **BASE,
        **rotary("halves", 1e6, YaRN(4.0, 32768, attention_factor=1.25)),
        trained_context=131072,
    ),
    "qwen3": ModelSpec.of("qwen3", **BASE, **rotary("halves", 1e6)),
    "mixtral": ModelSpec.of("mixtral", **BASE, **rotary("adjacent"), experts=Experts(count=4, top=2)),
    "qwen3_moe": ModelSpec.of("qwen3_moe", **BASE, **rotary("halves", 1e6), experts=Experts(count=5, top=2)),
    "gpt_oss": ModelSpec.of(
        "gpt_oss",
        **{**BASE, "patterns": (Window.last(6), Causal())},
        **rotary("halves", 150000.0),
        experts=Experts(count=4, top=2, router_bias=True),
    ),
    "smollm3": ModelSpec.of("smollm3", **FOUR, positions=in_pairing(NOPE, "adjacent")),
    "ernie4_5": ModelSpec.of("ernie4_5", **BASE),
    "seed_oss": ModelSpec.of("seed_oss", **BASE, **rotary("halves", 1e7)),
    "cohere": ModelSpec.of("cohere", **SQUARE, init_std=0.1),
    "cohere2": ModelSpec.of(
        "cohere2", **{**SQUARE, "layers": 4}, patterns=(*(Window.last(6),) * 3, Causal())
    ),
    "internlm3": ModelSpec.of("internlm3", **BASE, **rotary("adjacent")),
    "granite": ModelSpec.of(
        "granite",
        **{**SQUARE, **rotary("adjacent")},
        **GRANITE,
    ),
    "olmo2": ModelSpec.of("olmo2", **SQUARE, **rotary("halves", 5e5)),
    "olmo3": ModelSpec.of(
        "olmo3",
        **{**SQUARE, "layers": 4, "patterns": (*(Window.last(6),) * 3, Causal())},
        positions=PerLayer((*(LOCAL,) * 3, replace(LOCAL, scaling=YaRN(4.0, 2048)))),
        trained_context=8192,
    ),
    "gemma": ModelSpec.of("gemma", **BASE, **rotary("halves")),
    "gemma2": ModelSpec.of("gemma2", **BASE, **rotary("halves"), patterns=(Window.last(6), Causal())),
    "gemma3": ModelSpec.of(
        "gemma3_text",
        **{**BASE, "layers": 6, "patterns": (*(Window.last(6),) * 5, Causal())},
        positions=PerLayer(
            (*(Rotary(pairing="halves"),) * 5, Rotary(1e6, pairing="halves", scaling=LinearScaling(8.0)))
        ),
    ),
    "gemma3n": ModelSpec.of("gemma3n_text", **THREE_N),
    "gemma4, e": ModelSpec.of("gemma4_text", **FOUR_E, logit_cap=30.0),
    "gemma4": ModelSpec.of("gemma4_text", **FOUR_DENSE, logit_cap=30.0),
    "phi3": ModelSpec.of("phi3", **SQUARE, **rotary("halves")),
    "glm": ModelSpec.of("glm", **SQUARE),
    "stablelm": ModelSpec.of("stablelm", **SQUARE, qkv_bias=True),
    "starcoder2": ModelSpec.of("starcoder2", **SQUARE, **rotary("halves", 1e5)),
    "phi": ModelSpec.of("phi", **ALIKE),
    "gpt_neox": ModelSpec.of("gpt_neox", **ALIKE),
    "falcon": ModelSpec.of("falcon", **{**SQUARE, "kv_heads": 1, "hidden": 256}, **rotary("halves")),
    "gpt2": ModelSpec.of("gpt2", **ALIKE, **TABLE),
    "gpt_bigcode": ModelSpec.of("gpt_bigcode", **{**ALIKE, "kv_heads": 1}, **TABLE),
    "bloom": ModelSpec.of("bloom", **ALIKE),
    "mpt": ModelSpec.of("mpt", **ALIKE),
    "olmo": ModelSpec.of("olmo", **SQUARE, **rotary("adjacent")),
    "glm4": ModelSpec.of("glm4", **SQUARE, qkv_bias=True),
    "arcee": ModelSpec.of("arcee", **SQUARE, **rotary("adjacent")),
    "jais2": ModelSpec.of("jais2", **SQUARE),
    "nemotron": ModelSpec.of("nemotron", **SQUARE),
    "hunyuan": ModelSpec.of("hunyuan_v1_dense", **SQUARE),
    "exaone4": ModelSpec.of("exaone4", **SQUARE),
    "exaone4, windows": ModelSpec.of(
        "exaone4",
        **{**SQUARE, "layers": 4},
        patterns=(*(Window.last(6),) * 3, Causal()),
        positions=PerLayer((*(LOCAL,) * 3, NoPositions())),
    ),
    "minimax_m2": ModelSpec.of(
        "minimax_m2", **SQUARE, experts=Experts(count=4, top=2, score="sigmoid", choice_bias=True)
    ),
    "qwen2_moe": ModelSpec.of(
        "qwen2_moe", **{**SQUARE, **rotary("halves", 1e6)}, experts=replace(SHARED, normalized=False)
    ),
    "olmoe": ModelSpec.of(
        "olmoe",
        **{**SQUARE, "kv_heads": 4, **rotary("halves")},
        experts=Experts(count=4, top=2, normalized=False),
    ),
    "granitemoe": ModelSpec.of(
        "granitemoe", **SQUARE, **rotary("adjacent"), experts=Experts(count=4, top=2), **GRANITE
    ),
    "granitemoeshared": ModelSpec.of(
        *("granitemoeshared",),
        **SQUARE,
        **rotary("adjacent"),
        experts=Experts(count=4, top=2, shared=40),
        **GRANITE,
    ),
    "lfm2": ModelSpec.of("lfm2", **CONV),
    "lfm2_moe": ModelSpec.of(
        "lfm2_moe",
        **CONV,
        experts=(
            None,
            *(Experts(count=4, top=2, hidden=48, score="sigmoid", choice_bias=True, sum_eps=1e-6),) * 2,
        ),
    ),
    "mamba2": ModelSpec.of("mamba2", **{**SQUARE, "heads": 8, "kv_heads": 8, "hidden": 0}, mixers=SSD),
    "bamba": ModelSpec.of(
        "bamba",
        **HYBRID,
        mixers=(SSD, SSD, Softmax(), SSD),
        positions=Rotary(pairing="adjacent", dims=8),
    ),
    "granite 4 h": ModelSpec.of("granitemoehybrid", **HYBRID, mixers=(SSD, Softmax()), **GRANITE),
    "granite 4 h, experts": ModelSpec.of(
        "granitemoehybrid",
        **HYBRID,
        mixers=(SSD, SSD, SSD, Softmax()),
        experts=Experts(count=4, top=2, shared=40),
        **GRANITE,
    ),
    "falcon-h1": ModelSpec.of(
        "falcon_h1", **BASE, **rotary("halves", 1e11), mixers=Softmax(beside=replace(SSD, norm=False))
    ),
    "falcon-h1, norms": ModelSpec.of(
        "falcon_h1", **BASE, **rotary("halves", 1e11), mixers=Softmax(beside=SSD), tied=True
    ),
    "nemotron-h": ModelSpec.of("nemotron_h", **NEMOTRON, layer_hidden=(0, None, 0, None)),
    "nemotron-h, experts": ModelSpec.of(
        "nemotron_h",
        **{**NEMOTRON, "hidden": 48},
        layer_hidden=(0, None, 0, 0),
        experts=(NANO, None, NANO, NANO),
    ),
    "qwen3_next": ModelSpec.of("qwen3_next", **QWEN, experts=SHARED),
    "qwen3.5": ModelSpec.of("qwen3_5_text", **QWEN),
    "qwen3.5, a value of each key": ModelSpec.of(
        "qwen3_5_text", **{**QWEN, "mixers": (replace(DELTA, heads=2), Softmax())}, tied=True
    ),
    "qwen3.5, experts": ModelSpec.of("qwen3_5_moe_text", **QWEN, experts=SHARED),
}
FACTORED = {
    "falcon-h1, factors": ModelSpec.of(
        "falcon_h1",
        **BASE,
        **rotary("halves", 1e11),
        mixers=Softmax(
            beside=replace(SSD, norm=False, factors=(0.5, 1.5, 0.75, 1.25, 0.9)), factors=(0.8, 1.2)
        ),
        attention_scale=0.6 * 32**-0.5,
        mlp_gate_scale=0.7,
        mlp_scale=1.3,
        embedding_scale=3.0,
        logit_scale=0.5,
    )
}
"""Specs with factors that GGUF files fold into the matrices."""


def weights(spec, dtype=torch.float32):
    """Returns weights of a spec; norms and biases are random, too."""
    g = torch.Generator().manual_seed(0)
    state = build(spec, seed=0).state_dict()
    return {
        name: (value + 0.3 * torch.randn(value.shape, generator=g)).to(dtype) for name, value in state.items()
    }
