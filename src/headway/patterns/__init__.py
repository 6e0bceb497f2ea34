"""Attention patterns, which declare the tokens that each token may see."""

from headway.patterns.base import And, Or, Pattern, PerHead, Retention, classify, judge, visible
from headway.patterns.count import FATES, draw, fates, pairs
from headway.patterns.leaves import Causal, Chunk, Full, Global, GlobalKeys, GlobalQueries, Sink, Window
from headway.patterns.text import parse
from headway.patterns.tiles import Extent

__all__ = [
    "FATES",
    "And",
    "Causal",
    "Chunk",
    "Extent",
    "Full",
    "Global",
    "GlobalKeys",
    "GlobalQueries",
    "Or",
    "Pattern",
    "PerHead",
    "Retention",
    "Sink",
    "Window",
    "classify",
    "draw",
    "fates",
    "judge",
    "pairs",
    "parse",
    "visible",
]
