"""The model families, as data: each is a set of `ModelSpec` defaults, not a class."""

from collections.abc import Mapping

from headway.errors import check_known
from headway.models.decoder_families import DECODERS
from headway.models.encoder_families import ENCODERS, PAIRS
from headway.models.expert_families import EXPERTS
from headway.models.family import GPT2, LAYER_NORM, NEOX, Family, grouped, partial_rotary
from headway.models.hybrid_families import HYBRIDS
from headway.models.missing import unknown_model
from headway.models.normed_families import NORMED
from headway.positions import LinearBias

FAMILIES: Mapping[str, Family] = {
    "llama": grouped("pre-norm RMSNorm, rotary positions, SwiGLU; LLaMA 1, 2 and 3"),
    "mistral": grouped(
        "llama with a sliding window in all layers, or in none",
        {"norm_eps": 1e-5, "trained_context": 32768},
    ),
    "ministral": grouped(
        "llama with a sliding window or none, chosen per layer",
        {"norm_eps": 1e-5, "trained_context": 32768},
    ),
    "qwen2": grouped(
        "llama with biases on queries, keys and values, and windows per layer",
        {"qkv_bias": True, "trained_context": 32768},
        theta=1e6,
    ),
    "qwen3": grouped(
        "llama with normed queries and keys, a free head_dim, and windows per layer",
        {"qk_norm": "head", "trained_context": 40960},
        theta=1e6,
    ),
    **NORMED,
    "gpt2": Family("pre-norm LayerNorm, learned positions, GELU, biases everywhere", GPT2),
    "gpt_bigcode": Family("gpt2 with multi-query attention (SantaCoder, StarCoder)", {**GPT2, "kv_heads": 1}),
    "falcon": Family(
        "rotary positions, attention and feed-forward in parallel after one LayerNorm, one kv head",
        {
            **LAYER_NORM,
            "norm_eps": 1e-5,
            "order": "joint",
            "gated": False,
            "activation": "gelu",
            "kv_heads": 1,
            "tied": True,
        },
    ),
    "starcoder2": grouped(
        "rotary positions, LayerNorm, biases, grouped keys, windows per layer",
        {**NEOX, "activation": "gelu_pytorch_tanh", "tied": True, "trained_context": 4096},
        theta=1e5,
    ),
    "gpt_neox": Family(
        "a quarter of each head rotated, attention and feed-forward in parallel, each after its own LayerNorm; Pythia",
        {**NEOX, "order": "parallel", "activation": "gelu"},
        derive=partial_rotary(0.25),
    ),
    "phi": Family(
        "half of each head rotated, attention and feed-forward in parallel after one LayerNorm, biases everywhere",
        {**NEOX, "order": "joint", "activation": "gelu_pytorch_tanh", "output_bias": True},
        derive=partial_rotary(0.5),
    ),
    "bloom": Family(
        "gpt2 with ALiBi, and a LayerNorm after the embedding",
        {
            **GPT2,
            "positions": LinearBias(),
            "embedding_norm": True,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "trained_context": 2048,
        },
    ),
    "mpt": Family(
        "pre-norm LayerNorm, ALiBi, GELU, no biases at all",
        {
            "norm": "layer",
            "norm_eps": 1e-5,
            "positions": LinearBias(),
            "gated": False,
            "activation": "gelu",
            "tied": True,
        },
    ),
    **DECODERS,
    **EXPERTS,
    **HYBRIDS,
    **PAIRS,
    **ENCODERS,
}


def find_family(name: str) -> Family:
    """Returns the named family. Raises ConfigError for a name that is not in `FAMILIES`."""
    check_known(name, FAMILIES, "ModelSpec: there is no family", hint=unknown_model)
    return FAMILIES[name]
