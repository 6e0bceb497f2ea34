"""Models with their tokenizers, ready to use: `headway.load(...)`."""

from headway.api.classification import Answerer, Classifier, Label, Tagger
from headway.api.encoders import Candidate, Embedder, MaskedLM, TextEncoder
from headway.api.language import LanguageModel
from headway.api.loading import load
from headway.api.looking import EncoderDecoderMaps, EncoderDecoderStates
from headway.api.translator import Translator
from headway.data.spans import Answer, Span
from headway.models.attention_maps import AttentionMap, AttentionMaps

__all__ = [
    "Answer",
    "Answerer",
    "AttentionMap",
    "AttentionMaps",
    "Candidate",
    "Classifier",
    "Embedder",
    "EncoderDecoderMaps",
    "EncoderDecoderStates",
    "Label",
    "LanguageModel",
    "MaskedLM",
    "Span",
    "Tagger",
    "TextEncoder",
    "Translator",
    "load",
]
