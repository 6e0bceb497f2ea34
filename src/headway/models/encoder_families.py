"""Families of encoders and of encoder-decoders."""

from collections.abc import Mapping
from typing import Any

from headway.models.family import BIASES, LAYER_NORM, Family, grouped, scaled_embedding
from headway.models.head import Head
from headway.patterns import Full, Global, Window
from headway.positions import Learned, Relative, Rotary, Sinusoidal, T5Bias


def _scaled_logits(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a scale of 1/sqrt(M) on the states before a tied output layer, as in T5's code; 1 if untied."""
    return {"logit_scale": fields["width"] ** -0.5 if fields.get("tied") else 1.0}


_2017 = {
    **LAYER_NORM,
    "order": "post",
    "final_norm": False,
    "gated": False,
    "mlp_bias": True,
    "dropout": 0.1,
    "trained_context": 512,
}
_GELU_2017 = {
    **_2017,
    **BIASES,
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
_ROTARY = {name: value for name, value in _BERT.items() if name != "positions"}
_MODERN = {
    **LAYER_NORM,
    "norm_bias": False,
    "norm_eps": 1e-5,
    "embedding_norm": True,
    "first_norm": False,
    "activation": "gelu",
    "output_bias": True,
    "tied": True,
    "trained_context": 8192,
}
_PRE = {"order": "pre", "final_norm": True}
_BART = {
    **_GELU_2017,
    "positions": Learned(1024, offset=2),
    "norm_eps": 1e-5,
    "trained_context": 1024,
}
_MARIAN = {
    **_2017,
    **BIASES,
    "positions": Sinusoidal(pairing="halves"),
    "norm_eps": 1e-5,
    "output_bias": True,
    "tied": True,
}
_T5 = {
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
}

PAIRS: Mapping[str, Family] = {
    "transformer": Family(
        "the Transformer of 2017: post-norm, sinusoidal positions, ReLU; no biases in attention",
        {**_2017, "positions": Sinusoidal(), "activation": "relu", "norm_eps": 1e-6},
        derive=scaled_embedding,
    ),
    "marian": Family(
        "transformer with biases in attention and on the output, SiLU, and sines before cosines",
        _MARIAN,
        derive=scaled_embedding,
    ),
    "bart": Family("transformer with learned positions, a norm behind the embedding, and GELU", _BART),
    "mbart": Family(
        "bart in pre-norm order with a last norm, and scaled embeddings",
        {**_BART, "order": "pre", "final_norm": True},
        derive=scaled_embedding,
    ),
    "plbart": Family("bart with scaled embeddings", _BART, derive=scaled_embedding),
    "mvp": Family("bart trained on labelled tasks: the same model", _BART),
    "blenderbot": Family(
        "mbart without a norm after the embedding",
        {**_BART, **_PRE, "embedding_norm": False, "positions": Learned(128), "trained_context": 128},
        derive=scaled_embedding,
    ),
    "pegasus": Family(
        "marian in pre-norm order with a last norm",
        {**_MARIAN, **_PRE, "activation": "gelu", "trained_context": 1024},
        derive=scaled_embedding,
    ),
    "m2m_100": Family(
        "pegasus with ReLU, positions that start at 2, no output bias; NLLB",
        {
            **_MARIAN,
            **_PRE,
            "positions": Sinusoidal(pairing="halves", closed=True, first=2),
            "activation": "relu",
            "output_bias": False,
            "attention_dropout": 0.1,
            "trained_context": 1024,
        },
        derive=scaled_embedding,
    ),
    "t5": Family(
        "pre-norm RMSNorm, a distance bias shared by all layers, unscaled scores, ReLU",
        _T5,
        derive=_scaled_logits,
    ),
    "mt5": Family(
        "t5 with GEGLU, a separate output layer, unscaled logits, and a hundred languages",
        {**_T5, "gated": True, "activation": "gelu_pytorch_tanh", "tied": False},
    ),
}
"""Families of encoder-decoders."""
ENCODERS: Mapping[str, Family] = {
    "bert": Family("post-norm encoder, learned positions, GELU, segments", _BERT),
    "roberta": Family("bert without segments, positions from 2 on", _ROBERTA),
    "xlm-roberta": Family("roberta trained on a hundred languages: the same model", _ROBERTA),
    "camembert": Family("roberta trained on French: the same model", _ROBERTA),
    "data2vec-text": Family("roberta with other tensor names", _ROBERTA),
    "roberta-prelayernorm": Family("roberta in pre-norm order with a last norm", {**_ROBERTA, **_PRE}),
    "longformer": Family(
        "roberta with windows, global tokens and separate projections for these",
        {
            **_ROBERTA,
            "positions": Learned(4096, offset=2),
            "patterns": Window.around(256) | Global(),
            "global_projections": True,
            "trained_context": 4096,
        },
    ),
    "modernbert": Family(
        "pre-norm LayerNorm, none before the first layer, rotary positions, GELU with a gate, windows per layer",
        {
            **_MODERN,
            "causal": False,
            "patterns": Full(),
            "head": Head("masked-lm", dense="gelu", bias=False),
        },
        theta=1.6e5,
    ),
    "modernbert-decoder": Family(
        "modernbert as a causal decoder",
        {**_MODERN, "head": Head("lm", dense="gelu", bias=False)},
        theta=1.6e5,
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
    "electra": Family(
        "bert with an embedding that may be narrower than its layers",
        {**_BERT, "pooled_dropout": True},
        classifier="gelu",
    ),
    "distilbert": Family("bert without segments", {**_BERT, "token_types": 0}, classifier="relu"),
    "megatron-bert": Family(
        "bert in pre-norm order with a last norm, and no norm after the embedding",
        {**_BERT, **_PRE, "embedding_norm": False},
    ),
    "ernie": Family("bert trained on phrases and entities: the same model", _BERT),
    "jina_embeddings_v3": Family(
        "roberta with rotary positions",
        {**_ROTARY, "norm_eps": 1e-5, "token_types": 1, "pooled_dropout": True, "trained_context": 8194},
        theta=20000.0,
    ),
    "nomic_bert": Family(
        "bert with rotary positions, SwiGLU, no biases in its layers",
        {
            **_ROTARY,
            **dict.fromkeys(BIASES, False),
            "gated": True,
            "activation": "silu",
            "head": Head("masked-lm", dense="silu"),
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "trained_context": 2048,
        },
        theta=1000.0,
    ),
    "eurobert": grouped(
        "llama as a bidirectional encoder",
        {
            "causal": False,
            "patterns": Full(),
            "head": Head("masked-lm"),
            "norm_eps": 1e-5,
            "trained_context": 8192,
        },
        classifier="gelu",
    ),
    "wobert": Family("bert over Chinese words: the same model, of another vocab", _BERT),
    "nezha": Family(
        "bert with fixed relative positions on keys (its published layers have them on values, too)",
        {**_BERT, "positions": Relative(64, sinusoidal=True)},
    ),
}
