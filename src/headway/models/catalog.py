"""Published model sizes by name: architectures without weights."""

from collections.abc import Mapping
from typing import Any

from headway.errors import check_known
from headway.models import cost
from headway.models.missing import unknown_model
from headway.models.spec import ModelSpec
from headway.nn import Experts
from headway.patterns import Causal, Window
from headway.positions import Learned, Llama3, Rotary, Scaling, YaRN


def _rotary(theta: float, scaling: Scaling | None = None) -> dict[str, Any]:
    return {"positions": Rotary(theta, pairing="halves", scaling=scaling)}


def _sizes(*sizes: int, **more: Any) -> dict[str, Any]:
    return {**dict(zip(("width", "layers", "heads", "kv_heads", "hidden"), sizes, strict=True)), **more}


_LLAMA_1 = {"family": "llama", "vocab": 32000, "norm_eps": 1e-6, "trained_context": 2048}
_LLAMA_2 = {"family": "llama", "vocab": 32000, "norm_eps": 1e-5, "trained_context": 4096}
_LLAMA_3 = {
    "family": "llama",
    "vocab": 128256,
    "norm_eps": 1e-5,
    "trained_context": 8192,
    **_rotary(500000.0),
}
_LLAMA_31 = {**_LLAMA_3, "trained_context": 131072, **_rotary(500000.0, Llama3(8.0, 1.0, 4.0, 8192))}
_LLAMA_32 = {**_LLAMA_31, "tied": True, **_rotary(500000.0, Llama3(32.0, 1.0, 4.0, 8192))}
_MISTRAL = {"family": "mistral", "vocab": 32000, "trained_context": 32768, "patterns": Window.last(4096)}
# Vaswani et al. 2017, table 3, with the vocab of section 5.1 (English and German together); norm_eps and the missing
# biases in attention follow their code.
_2017 = {"family": "transformer", "vocab": 37000, "tied": True, "encoder": {}}
# Jiang et al. 2024, table 1; OpenAI 2025, table 1, and its config.json.
_MIXTRAL = {"family": "mixtral", "vocab": 32000, "trained_context": 32768}
_GPT_OSS = {"family": "gpt_oss", "vocab": 201088, "head_dim": 64, "patterns": (Window.last(128), Causal())}
_QWEN_2 = {"family": "qwen2", "vocab": 151936, "trained_context": 131072, "tied": True}
_QWEN_3 = {"family": "qwen3", "vocab": 151936, "trained_context": 40960, "tied": True, "head_dim": 128}
_BASE, _LARGE = _sizes(768, 12, 12, 12, 3072), _sizes(1024, 24, 16, 16, 4096)
_SMALL = _sizes(384, 6, 6, 6, 1536)
# From each model's config.json on the Hugging Face Hub: google-bert, FacebookAI, sijunhe (NEZHA), junnyu (WoBERT,
# RoFormer).
_BERT_ZH = {"family": "bert", "vocab": 21128}
_ROBERTA = {"family": "roberta", "vocab": 50265}
_NEZHA = {"family": "nezha", "vocab": 21128}
_ROFORMER = {"family": "roformer", "vocab": 50000}
# All four share one vocab and one number of positions (Radford et al. 2019, table 2).
_GPT_2 = {"family": "gpt2", "vocab": 50257}
_STARCODER = {"family": "gpt_bigcode", "vocab": 49152, "activation": "gelu", "positions": Learned(8192),
              "trained_context": 8192}  # fmt: skip
_FALCON = {"family": "falcon", "vocab": 65024, "trained_context": 2048}
_STARCODER_2 = {
    "family": "starcoder2",
    "vocab": 49152,
    "trained_context": 16384,
    "patterns": Window.last(4096),
}

_CATALOG: Mapping[str, Mapping[str, Any]] = {
    "transformer-base": {**_2017, **_sizes(512, 6, 8, 8, 2048)},
    "transformer-big": {**_2017, **_sizes(1024, 6, 16, 16, 4096, dropout=0.3)},
    "llama-1-7b": {**_LLAMA_1, **_sizes(4096, 32, 32, 32, 11008)},
    "llama-1-13b": {**_LLAMA_1, **_sizes(5120, 40, 40, 40, 13824)},
    "llama-1-33b": {**_LLAMA_1, **_sizes(6656, 60, 52, 52, 17920)},
    "llama-1-65b": {**_LLAMA_1, **_sizes(8192, 80, 64, 64, 22016, norm_eps=1e-5)},
    "llama-2-7b": {**_LLAMA_2, **_sizes(4096, 32, 32, 32, 11008)},
    "llama-2-13b": {**_LLAMA_2, **_sizes(5120, 40, 40, 40, 13824)},
    # Never released; the sizes are those of Code Llama 34B, which was trained from it.
    "llama-2-34b": {**_LLAMA_2, **_sizes(8192, 48, 64, 8, 22016)},
    "llama-2-70b": {**_LLAMA_2, **_sizes(8192, 80, 64, 8, 28672)},
    "llama-3-8b": {**_LLAMA_3, **_sizes(4096, 32, 32, 8, 14336)},
    "llama-3-70b": {**_LLAMA_3, **_sizes(8192, 80, 64, 8, 28672)},
    "llama-3.1-8b": {**_LLAMA_31, **_sizes(4096, 32, 32, 8, 14336)},
    "llama-3.1-70b": {**_LLAMA_31, **_sizes(8192, 80, 64, 8, 28672)},
    "llama-3.2-1b": {**_LLAMA_32, **_sizes(2048, 16, 32, 8, 8192)},
    "llama-3.2-3b": {**_LLAMA_32, **_sizes(3072, 28, 24, 8, 8192)},
    "mistral-7b": {**_MISTRAL, **_sizes(4096, 32, 32, 8, 14336)},
    "mistral-7b-v0.3": {
        **_MISTRAL,
        **_rotary(1e6),
        **_sizes(4096, 32, 32, 8, 14336, vocab=32768, patterns=Causal()),
    },
    "mixtral-8x7b": {**_MIXTRAL, **_sizes(4096, 32, 32, 8, 14336)},
    "gpt-oss-20b": {
        **_GPT_OSS,
        **_rotary(150000.0, YaRN(32.0, 4096, truncate=False)),
        **_sizes(2880, 24, 64, 8, 2880, experts=Experts(count=32, top=4, router_bias=True)),
    },
    "qwen2-0.5b": {**_QWEN_2, **_sizes(896, 24, 14, 2, 4864)},
    "qwen2-1.5b": {**_QWEN_2, **_sizes(1536, 28, 12, 2, 8960)},
    "qwen2-7b": {**_QWEN_2, **_sizes(3584, 28, 28, 4, 18944, vocab=152064, tied=False)},
    "qwen3-0.6b": {**_QWEN_3, **_sizes(1024, 28, 16, 8, 3072)},
    "qwen3-1.7b": {**_QWEN_3, **_sizes(2048, 28, 16, 8, 6144)},
    "qwen3-4b": {**_QWEN_3, **_sizes(2560, 36, 32, 8, 9728)},
    "qwen3-8b": {**_QWEN_3, **_sizes(4096, 36, 32, 8, 12288, tied=False)},
    "bert-base-uncased": {**_BASE, "family": "bert", "vocab": 30522},
    "bert-large-uncased": {**_LARGE, "family": "bert", "vocab": 30522},
    "bert-base-chinese": {**_BERT_ZH, **_BASE},
    "roberta-base": {**_ROBERTA, **_BASE},
    "roberta-large": {**_ROBERTA, **_LARGE},
    "wobert-chinese-base": {**_BASE, "family": "wobert", "vocab": 33586},
    "wobert-chinese-plus-base": {**_BASE, "family": "wobert", "vocab": 50000},
    "nezha-cn-base": {**_NEZHA, **_BASE},
    "nezha-cn-large": {**_NEZHA, **_LARGE},
    "roformer-chinese-base": {**_ROFORMER, **_BASE},
    "roformer-chinese-small": {**_ROFORMER, **_SMALL, "trained_context": 512},
    "roformer-chinese-char-base": {**_ROFORMER, **_BASE, "vocab": 12000, "trained_context": 512},
    "roformer-chinese-char-small": {**_ROFORMER, **_SMALL, "vocab": 12000, "trained_context": 512},
    "gpt2": {**_GPT_2, **_sizes(768, 12, 12, 12, 3072)},
    "gpt2-medium": {**_GPT_2, **_sizes(1024, 24, 16, 16, 4096)},
    "gpt2-large": {**_GPT_2, **_sizes(1280, 36, 20, 20, 5120)},
    "gpt2-xl": {**_GPT_2, **_sizes(1600, 48, 25, 25, 6400)},
    "santacoder": {
        **_sizes(2048, 24, 16, 1, 8192, family="gpt_bigcode", vocab=49280),
        "positions": Learned(2048),
        "trained_context": 2048,
    },
    "starcoderbase": {**_STARCODER, **_sizes(6144, 40, 48, 1, 24576)},
    "starcoderbase-1b": {**_STARCODER, **_sizes(2048, 24, 16, 1, 8192)},
    "starcoder2-3b": {**_STARCODER_2, **_rotary(999999.4420358813), **_sizes(3072, 30, 24, 2, 12288)},
    "starcoder2-7b": {**_STARCODER_2, **_rotary(1e6), **_sizes(4608, 32, 36, 4, 18432)},
    "starcoder2-15b": {**_STARCODER_2, **_sizes(6144, 40, 48, 4, 24576, tied=False)},
    "falcon-7b": {**_FALCON, **_sizes(4544, 32, 71, 1, 18176)},
    "falcon-40b": {**_FALCON, **_sizes(8192, 60, 128, 8, 32768, order="parallel")},
    "falcon-180b": {**_FALCON, **_sizes(14848, 80, 232, 8, 59392, order="parallel")},
}


UNITS: Mapping[str, str] = {
    "bert-base-chinese": "char",
    "nezha-cn-base": "char",
    "nezha-cn-large": "char",
    "wobert-chinese-base": "word",
    "wobert-chinese-plus-base": "word",
    "roformer-chinese-base": "word",
    "roformer-chinese-small": "word",
    "roformer-chinese-char-base": "char",
    "roformer-chinese-char-small": "char",
}
"""Whether the tokens of each published Chinese vocab are mostly characters ("char") or words ("word")."""
COMPARED = ("bert-base-chinese", "wobert-chinese-base", "nezha-cn-base", "roformer-chinese-base")
"""The four models that Su et al. 2021, section 4.5, compare."""


def names() -> tuple[str, ...]:
    """Returns all names of the catalog."""
    return tuple(_CATALOG)


def spec(name: str) -> ModelSpec:
    """Returns the spec of the named model; case is ignored. Raises ConfigError for an unknown name."""
    check_known(name.lower(), _CATALOG, "the catalog has no model", are="it has", hint=unknown_model)
    fields = dict(_CATALOG[name.lower()])
    family = fields.pop("family")
    return ModelSpec.of_pair(family, **fields) if "encoder" in fields else ModelSpec.of(family, **fields)


def row(name: str) -> dict[str, str | int]:
    """Returns the facts about one model of the catalog. Raises ConfigError as `spec` does.

    tokens      "char" or "word" (`UNITS`), "" for other vocabs
    parameters  of all stacks; the other sizes are the decoder's if there are two stacks
    context     the context length in training
    """
    model = spec(name)
    return {
        "name": name,
        "family": model.family,
        "kind": model.kind,
        "tokens": UNITS.get(name, ""),
        "positions": type(model.positions).__name__,
        "parameters": cost.parameter_count(model),
        **{
            size: getattr(model, size) for size in ("layers", "width", "heads", "kv_heads", "hidden", "vocab")
        },
        "context": model.trained_context,
    }
