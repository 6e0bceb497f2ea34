"""The families of models, which differ by a few switches: data, not classes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.errors import check_known, unknown_model
from headway.models.head import Head
from headway.patterns import Full, Global, Window
from headway.positions import Learned, LinearBias, Relative, Rotary, Sinusoidal, T5Bias


@dataclass(frozen=True)
class Family:
    """What is so in every model of a family, and what is so unless said otherwise.

    Attributes:
        about: one line.
        defaults: fields of `ModelSpec` that need not be given (patterns are Causal() where none are).
        theta: of the rotary positions, unless given.
        classifier: activation of the dense layer in front of a classifier of texts, in an encoder.
        groups: whether several query heads share a kv head in models of one's own (`ModelSpec.of_depth`).
        derive: more such fields, from those that are known by then.
    """

    about: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    theta: float = 10000.0
    derive: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda given: {}
    groups: bool = False
    classifier: str = "tanh"

    def hidden(self, width: int) -> int:
        """F in models of one's own: 8/3 M, rounded up to a multiple of 64, with a gate, and 4 M without one; either has
        8 M^2 weights. (Shazeer 2020, section 3.)"""
        return -(-8 * width // 3 // 64) * 64 if self.defaults.get("gated", True) else 4 * width

    def kv_heads(self, heads: int, group: int) -> int:
        """K in models of one's own: always one, or H / group, or H."""
        always: int | None = self.defaults.get("kv_heads")
        return always or (heads // group if self.groups else heads)


def _scaled_embedding(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Embeddings times sqrt(M). (Vaswani et al. 2017, section 3.4.)"""
    return {"embedding_scale": given["width"] ** 0.5}


def _scaled_logits(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """States over sqrt(M) in front of an output layer that is the embedding, as in the code of T5."""
    return {"logit_scale": given["width"] ** -0.5 if given.get("tied") else 1.0}


def _partial_rotary(share: float) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Rotary positions that rotate a share of each head, rounded down to whole pairs, and one pair at least."""

    def positions(given: Mapping[str, Any]) -> Mapping[str, Any]:
        if "positions" in given:
            return {}
        head_dim = given.get("head_dim", given["width"] // max(given["heads"], 1))
        return {"positions": Rotary(pairing="halves", dims=max(2, 2 * int(head_dim * share / 2)))}

    return positions


_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
_LAYER_NORM = {"norm": "layer", "norm_bias": True}
_2017 = {
    **_LAYER_NORM,
    "order": "post",
    "final_norm": False,
    "gated": False,
    "mlp_bias": True,
    "dropout": 0.1,
    "trained_context": 512,
}
_GELU_2017 = {
    **_2017,
    **_BIASES,
    "embedding_norm": True,
    "activation": "gelu",
    "output_bias": True,
    "tied": True,
}
_BERT = {
    **_GELU_2017,
    "causal": False,
    "patterns": Full(),
    "positions": Learned(512),
    "norm_eps": 1e-12,
    "token_types": 2,
    "attention_dropout": 0.1,
    "head": Head("masked-lm", dense="gelu"),
}
_ROBERTA = {
    **_BERT,
    "positions": Learned(512, offset=2),
    "norm_eps": 1e-5,
    "token_types": 1,
    "pooled_dropout": True,
}
_BART = {
    **_GELU_2017,
    "positions": Learned(1024, offset=2),
    "norm_eps": 1e-5,
    "trained_context": 1024,
}
_NEOX = {**_LAYER_NORM, **_BIASES, "norm_eps": 1e-5, "gated": False}
_GPT2 = {
    **_NEOX,
    "positions": Learned(1024),
    "activation": "gelu_pytorch_tanh",
    "tied": True,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "trained_context": 1024,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family("pre-norm RMSNorm, rotary positions, SwiGLU; LLaMA 1, 2 and 3", groups=True),
    "mistral": Family(
        "llama with a sliding window in all layers, or in none",
        {"norm_eps": 1e-5, "trained_context": 32768},
        groups=True,
    ),
    "ministral": Family(
        "llama with a window or none, layer by layer",
        {"norm_eps": 1e-5, "trained_context": 32768},
        groups=True,
    ),
    "qwen2": Family(
        "llama with biases on queries, keys and values, and windows by layer",
        {"qkv_bias": True, "trained_context": 32768},
        theta=1e6,
        groups=True,
    ),
    "qwen3": Family(
        "llama with normed queries and keys, a free head_dim, and windows by layer",
        {"qk_norm": True, "trained_context": 40960},
        theta=1e6,
        groups=True,
    ),
    "gpt2": Family("pre-norm LayerNorm, learned positions, GELU, biases everywhere", _GPT2),
    "gpt_bigcode": Family(
        "gpt2 with one key and value for all heads (SantaCoder, StarCoder)", {**_GPT2, "kv_heads": 1}
    ),
    "falcon": Family(
        "rotary positions, attention and feed-forward side by side behind one LayerNorm, one kv head",
        {
            **_LAYER_NORM,
            "norm_eps": 1e-5,
            "order": "joint",
            "gated": False,
            "activation": "gelu",
            "kv_heads": 1,
            "tied": True,
        },
    ),
    "starcoder2": Family(
        "rotary positions, LayerNorm, biases, shared keys, windows by layer",
        {**_NEOX, "activation": "gelu_pytorch_tanh", "tied": True, "trained_context": 4096},
        theta=1e5,
        groups=True,
    ),
    "gpt_neox": Family(
        "a quarter of each head rotated, attention and feed-forward side by side, each behind its LayerNorm; Pythia",
        {**_NEOX, "order": "parallel", "activation": "gelu"},
        derive=_partial_rotary(0.25),
    ),
    "phi": Family(
        "half of each head rotated, attention and feed-forward side by side behind one LayerNorm, biases everywhere",
        {**_NEOX, "order": "joint", "activation": "gelu_pytorch_tanh", "output_bias": True},
        derive=_partial_rotary(0.5),
    ),
    "bloom": Family(
        "gpt2 with ALiBi, and a LayerNorm behind the embedding",
        {
            **_GPT2,
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
    "transformer": Family(
        "the Transformer of 2017: post-norm, sinusoidal positions, ReLU; no biases in attention",
        {**_2017, "positions": Sinusoidal(), "activation": "relu", "norm_eps": 1e-6},
        derive=_scaled_embedding,
    ),
    "marian": Family(
        "transformer with biases in attention and of every output, SiLU, and sines before cosines",
        {
            **_2017,
            **_BIASES,
            "positions": Sinusoidal(pairing="halves"),
            "norm_eps": 1e-5,
            "output_bias": True,
            "tied": True,
        },
        derive=_scaled_embedding,
    ),
    "bart": Family("transformer with learned positions, a norm behind the embedding, and GELU", _BART),
    "mbart": Family(
        "bart with its norms in front, one more behind the last layer, and scaled embeddings",
        {**_BART, "order": "pre", "final_norm": True},
        derive=_scaled_embedding,
    ),
    "t5": Family(
        "pre-norm RMSNorm, a bias by distance that all layers share, unscaled scores, ReLU",
        {
            "positions": T5Bias(),
            "gated": False,
            "activation": "relu",
            "attention_scale": 1.0,
            "tied": True,
            "dropout": 0.1,
            "final_dropout": True,
            "attention_dropout": 0.1,
            "activation_dropout": 0.1,
            "trained_context": 512,
        },
        derive=_scaled_logits,
    ),
    "bert": Family("post-norm encoder, learned positions, GELU, segments", _BERT),
    "roberta": Family("bert without segments, positions from 2 on", _ROBERTA),
    "longformer": Family(
        "roberta with windows, global tokens and projections of their own for these",
        {
            **_ROBERTA,
            "positions": Learned(4096, offset=2),
            "patterns": Window.around(256) | Global(),
            "global_projections": True,
            "trained_context": 4096,
        },
    ),
    "roformer": Family(
        "bert with rotary positions",
        {
            **_BERT,
            "positions": Rotary(pairing="adjacent"),
            "trained_context": 1536,
            "pooled_dropout": True,
        },
        classifier="gelu",
    ),
    "wobert": Family("bert over Chinese words: the same model, of another vocab", _BERT),
    "nezha": Family(
        "bert with fixed relative positions on keys (its published layers have them on values, too)",
        {**_BERT, "positions": Relative(64, sinusoidal=True)},
    ),
}


def find_family(name: str) -> Family:
    """The family of that name. Raises ConfigError for a name that is not in `FAMILIES`."""
    check_known(name, FAMILIES, "ModelSpec: there is no family", hint=unknown_model)
    return FAMILIES[name]
