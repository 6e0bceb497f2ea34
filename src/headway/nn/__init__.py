"""Layers: attention over declared patterns, norms, feed-forwards, embeddings, and the block that joins them."""

from headway.nn.attention import Attention
from headway.nn.block import ORDERS, Block, Order
from headway.nn.cross_entropy import IGNORE_INDEX, Losses
from headway.nn.embeddings import PositionEmbedding, TokenEmbedding, check_ids
from headway.nn.feedforward import ACTIVATIONS, FeedForward, GatedFeedForward, named_activation, swish
from headway.nn.global_attention import GlobalAttention
from headway.nn.linear_attention import LinearAttention
from headway.nn.norms import NORMS, LayerNorm, Norm, RMSNorm, make_norm
from headway.nn.output import OutputLayer
from headway.nn.rotary_embedding import RotaryEmbedding, Table
from headway.nn.scores import Scores

__all__ = [
    "ACTIVATIONS",
    "IGNORE_INDEX",
    "NORMS",
    "ORDERS",
    "Attention",
    "Block",
    "FeedForward",
    "GatedFeedForward",
    "GlobalAttention",
    "LayerNorm",
    "LinearAttention",
    "Losses",
    "Norm",
    "Order",
    "OutputLayer",
    "PositionEmbedding",
    "RMSNorm",
    "RotaryEmbedding",
    "Scores",
    "Table",
    "TokenEmbedding",
    "check_ids",
    "make_norm",
    "named_activation",
    "swish",
]
