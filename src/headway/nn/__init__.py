"""Layers: attention over declared patterns, norms, feed-forwards, embeddings, and the block that joins them."""

from headway.nn.adapters import (
    Adapter,
    adapted,
    adapter_names,
    attach,
    block_linears,
    detach,
    merge,
    named_adapter_parameters,
    set_active,
    unmerge,
)
from headway.nn.attention import Attention, GlobalAttention
from headway.nn.attention_layer import AttentionLayer
from headway.nn.beside import AttentionBeside
from headway.nn.block import Block
from headway.nn.cross_entropy import IGNORE_INDEX, Losses
from headway.nn.cuts import Cut
from headway.nn.delta import DeltaPast, GatedDelta
from headway.nn.embeddings import PositionEmbedding, TokenEmbedding
from headway.nn.experts import Experts, MixtureOfExperts
from headway.nn.feedforward import FeedForward
from headway.nn.fused import ACTIVATIONS
from headway.nn.kept import Keeps
from headway.nn.linear import Linear, linears
from headway.nn.linear_attention import LinearAttention
from headway.nn.lora import Lora, LowRank
from headway.nn.mixers import MixingLayer
from headway.nn.mixing import StateLayer
from headway.nn.norms import LayerNorm, RMSNorm, make_norm
from headway.nn.output import output_cross_entropy, trained_rows
from headway.nn.positions import RotaryEmbedding, Scores
from headway.nn.share import Share
from headway.nn.short_conv import ShortConv, ShortConvolution
from headway.nn.ssd import SSD

__all__ = [
    "ACTIVATIONS",
    "IGNORE_INDEX",
    "SSD",
    "Adapter",
    "Attention",
    "AttentionBeside",
    "AttentionLayer",
    "Block",
    "Cut",
    "DeltaPast",
    "Experts",
    "FeedForward",
    "GatedDelta",
    "GlobalAttention",
    "Keeps",
    "LayerNorm",
    "Linear",
    "LinearAttention",
    "Lora",
    "Losses",
    "LowRank",
    "MixingLayer",
    "MixtureOfExperts",
    "PositionEmbedding",
    "RMSNorm",
    "RotaryEmbedding",
    "Scores",
    "Share",
    "ShortConv",
    "ShortConvolution",
    "StateLayer",
    "TokenEmbedding",
    "adapted",
    "adapter_names",
    "attach",
    "block_linears",
    "detach",
    "linears",
    "make_norm",
    "merge",
    "named_adapter_parameters",
    "output_cross_entropy",
    "set_active",
    "trained_rows",
    "unmerge",
]
