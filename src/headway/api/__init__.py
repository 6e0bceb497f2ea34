"""Models with their tokenizers, ready to use: `headway.load(...)`."""

from headway.api.classification import Answerer, Classifier, Label, Tagger
from headway.api.encoders import Candidate, Embedder, MaskedLM, TextEncoder
from headway.api.language import LanguageModel, Options
from headway.api.loading import load
from headway.api.translator import Translator
from headway.data.spans import Answer, Span

__all__ = [
    "Answer",
    "Answerer",
    "Candidate",
    "Classifier",
    "Embedder",
    "Label",
    "LanguageModel",
    "MaskedLM",
    "Options",
    "Span",
    "Tagger",
    "TextEncoder",
    "Translator",
    "load",
]
