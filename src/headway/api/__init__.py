"""Models with their tokenizers, ready to use: `headway.load(...)`."""

from headway.api.classification import Answerer, Classifier, Label, Tagger
from headway.api.encoders import Candidate, Embedder, MaskedLM, TextEncoder
from headway.api.language import LanguageModel
from headway.api.loading import load
from headway.api.looking import EncoderDecoderMaps, EncoderDecoderStates
from headway.api.translator import Translator
from headway.data.encoded import Answer, Span
from headway.models.attention_maps import AttentionMap, AttentionMaps, Shares
from headway.nn import Cut

__all__ = [
    "Answer",
    "Answerer",
    "AttentionMap",
    "AttentionMaps",
    "Candidate",
    "Classifier",
    "Cut",
    "Embedder",
    "EncoderDecoderMaps",
    "EncoderDecoderStates",
    "Label",
    "LanguageModel",
    "MaskedLM",
    "Shares",
    "Span",
    "Tagger",
    "TextEncoder",
    "Translator",
    "load",
]
