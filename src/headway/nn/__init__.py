"""Layers: attention over declared patterns, norms, feed-forwards, embeddings, and the block that joins them."""

from headway.nn.attention import (
    Attention,
    AttentionLayer,
    AttentionOptions,
    GlobalAttention,
    LinearAttention,
)
from headway.nn.block import ORDERS, Block, Order
from headway.nn.cross_entropy import IGNORE_INDEX, Losses
from headway.nn.embeddings import PositionEmbedding, TokenEmbedding, check_ids
from headway.nn.feedforward import ACTIVATIONS, FeedForward, GatedFeedForward, named_activation, swish
from headway.nn.linear import Linear, OutputLayer, output_cross_entropy, replace_linear
from headway.nn.mixers import GlobalMixer, LinearMixer, Mixer, SoftmaxMixer
from headway.nn.norms import NORMS, LayerNorm, Norm, RMSNorm, make_norm
from headway.nn.positions import RotaryEmbedding, Scores

__all__ = [
    "ACTIVATIONS",
    "IGNORE_INDEX",
    "NORMS",
    "ORDERS",
    "Attention",
    "AttentionLayer",
    "AttentionOptions",
    "Block",
    "FeedForward",
    "GatedFeedForward",
    "GlobalAttention",
    "GlobalMixer",
    "LayerNorm",
    "Linear",
    "LinearAttention",
    "LinearMixer",
    "Losses",
    "Mixer",
    "Norm",
    "Order",
    "OutputLayer",
    "PositionEmbedding",
    "RMSNorm",
    "RotaryEmbedding",
    "Scores",
    "SoftmaxMixer",
    "TokenEmbedding",
    "check_ids",
    "make_norm",
    "named_activation",
    "output_cross_entropy",
    "replace_linear",
    "swish",
]
