"""Models with their tokenizers, ready to use: `headway.load(...)`."""

from headway.api.language import LanguageModel, Options
from headway.api.loading import load

__all__ = ["LanguageModel", "Options", "load"]
