"""Layers: attention over declared patterns, norms, feed-forwards, embeddings, and the block that joins them."""

from headway.nn.attention import Attention, rotary_table, token_lengths
from headway.nn.block import Block
from headway.nn.embeddings import PositionEmbedding, TokenEmbedding
from headway.nn.feedforward import ACTIVATIONS, FeedForward, GatedFeedForward, swish
from headway.nn.linear import LinearAttention
from headway.nn.norms import LayerNorm, RMSNorm
from headway.nn.turns import Turns

__all__ = [
    "ACTIVATIONS",
    "Attention",
    "Block",
    "FeedForward",
    "GatedFeedForward",
    "LayerNorm",
    "LinearAttention",
    "PositionEmbedding",
    "RMSNorm",
    "TokenEmbedding",
    "Turns",
    "rotary_table",
    "swish",
    "token_lengths",
]
