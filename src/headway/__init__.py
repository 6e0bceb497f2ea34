"""headway: Transformer models with declared attention.

Declare what each token may attend to (a pattern), how query heads share keys and values, and how positions are encoded;
the same declaration is trained, cached, decoded, converted, drawn and costed. Names are resolved on first use, so that
importing the package does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.api import LanguageModel as LanguageModel
    from headway.api import load as load
    from headway.attention import KeyValues as KeyValues
    from headway.attention.attend import attend as attend
    from headway.attention.attend import attend_keys as attend_keys
    from headway.attention.attend import attention_weights as attention_weights
    from headway.choice import Choice as Choice
    from headway.errors import HeadwayError as HeadwayError
    from headway.generate import Sampling as Sampling
    from headway.heads import Heads as Heads
    from headway.models import ModelSpec as ModelSpec
    from headway.partial import Partial as Partial
    from headway.patterns import Causal as Causal
    from headway.patterns import Chunk as Chunk
    from headway.patterns import Full as Full
    from headway.patterns import Global as Global
    from headway.patterns import GlobalKeys as GlobalKeys
    from headway.patterns import GlobalQueries as GlobalQueries
    from headway.patterns import Pattern as Pattern
    from headway.patterns import PerHead as PerHead
    from headway.patterns import Sink as Sink
    from headway.patterns import Window as Window
    from headway.positions import Learned as Learned
    from headway.positions import NoPositions as NoPositions
    from headway.positions import Rotary as Rotary
    from headway.positions import Sinusoidal as Sinusoidal
    from headway.scores import ALiBi as ALiBi
    from headway.scores import Bias as Bias
    from headway.scores import RelativeBias as RelativeBias
    from headway.scores import RelativeKey as RelativeKey
    from headway.scores import SoftCap as SoftCap
    from headway.tokens import Tokens as Tokens

_HOMES = {
    "api": "LanguageModel load",
    "attention": "KeyValues",
    "attention.attend": "attend attend_keys attention_weights",
    "choice": "Choice",
    "errors": "HeadwayError",
    "generate": "Sampling",
    "heads": "Heads",
    "models": "ModelSpec",
    "partial": "Partial",
    "patterns": "Causal Chunk Full Global GlobalKeys GlobalQueries Pattern PerHead Sink Window",
    "positions": "Learned NoPositions Rotary Sinusoidal",
    "scores": "ALiBi Bias RelativeBias RelativeKey SoftCap",
    "tokens": "Tokens",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
_SUBMODULES = frozenset(home for home in _HOMES if "." not in home) | {
    "cache",
    "checkpoints",
    "classic",
    "compat",
    "data",
    "hardware",
    "nn",
    "text",
    "train",
}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(f"headway.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"headway.{name}")
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("headway")
    raise AttributeError(f"module 'headway' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_SUBMODULES, "__version__"})
