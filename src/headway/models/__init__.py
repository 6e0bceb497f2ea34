"""Models: one spec, three modules made of the same blocks, the families as data, and cost estimates."""

from headway.models import catalog, cost
from headway.models.build import Model, blank, build
from headway.models.decoder import Decoder
from headway.models.encoder import Encoder
from headway.models.encoder_decoder import EncoderDecoder, Memory
from headway.models.families import FAMILIES
from headway.models.family import Family
from headway.models.head import Head, mark_global
from headway.models.mixers import MIXERS, MixerKind, Softmax
from headway.models.spec import ModelSpec

__all__ = [
    "FAMILIES",
    "MIXERS",
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "Family",
    "Head",
    "Memory",
    "MixerKind",
    "Model",
    "ModelSpec",
    "Softmax",
    "blank",
    "build",
    "catalog",
    "cost",
    "mark_global",
]
