"""What the tests of GGUF share: small specs of each architecture, and weights that are not symmetric."""

import torch

from headway.models import FAMILIES, ModelSpec, build
from headway.patterns import Causal, Window
from headway.positions import LinearScaling, Llama3, LongRope, Rotary, YaRN, in_pairing

BASE = {"vocab": 70, "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "hidden": 96}


def rotary(pairing, theta=10000.0, scaling=None):
    return {"positions": Rotary(theta, pairing=pairing, scaling=scaling)}


FOUR, NOPE = {**BASE, "layers": 4}, FAMILIES["smollm3"].defaults["positions"]
SQUARE = {**BASE, "head_dim": 16}
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
    "smollm3": ModelSpec.of("smollm3", **FOUR, positions=in_pairing(NOPE, "adjacent")),
    "ernie4_5": ModelSpec.of("ernie4_5", **BASE),
    "seed_oss": ModelSpec.of("seed_oss", **BASE, **rotary("halves", 1e7)),
    "cohere": ModelSpec.of("cohere", **SQUARE, init_std=0.1),
    "cohere2": ModelSpec.of(
        "cohere2", **{**SQUARE, "layers": 4}, patterns=(*(Window.last(6),) * 3, Causal())
    ),
}


def weights(spec, dtype=torch.float32):
    """Weights of a spec; norms and biases are random, too."""
    g = torch.Generator().manual_seed(0)
    state = build(spec, seed=0).state_dict()
    return {n: (v + 0.3 * torch.randn(v.shape, generator=g)).to(dtype) for n, v in state.items()}
