"""Families that differ from LLaMA by where their norms stand and what they multiply by, and by factors and caps."""

from collections.abc import Mapping
from functools import partial

from headway.models.family import Family, scaled_embedding

_OLMO = {"order": "output", "qk_norm": "all", "norm_eps": 1e-5, "trained_context": 4096}
_GEMMA = {"norm_offset": 1.0, "activation": "gelu_pytorch_tanh", "tied": True, "trained_context": 8192}
_olmo = partial(Family, defaults=_OLMO, theta=5e5, groups=True)
_gemma = partial(Family, derive=scaled_embedding, groups=True)

NORMED: Mapping[str, Family] = {
    "granite": Family("llama with factors on embeddings, scores, logits and what is added", groups=True),
    "olmo2": _olmo(
        "llama whose norms stand on what sub-layers give, and over all queries and keys of a token"
    ),
    "olmo3": _olmo("olmo2 with windows by layer"),
    "gemma": _gemma("llama with norms times 1 + w, scaled embeddings, and GELU", _GEMMA),
    "gemma2": _gemma(
        "gemma with a norm on what each sub-layer gives, too, capped scores and logits, and windows by layer",
        {**_GEMMA, "order": "sandwich", "score_cap": 50.0, "logit_cap": 30.0},
    ),
    "gemma3_text": _gemma(
        "gemma2 with normed queries and keys instead of caps, and a base for each kind of layer; Gemma 3's text",
        {**_GEMMA, "order": "sandwich", "qk_norm": "head", "trained_context": 32768},
        theta=1e6,
    ),
}
