"""Layers: attention over declared patterns, norms, feed-forwards, embeddings, and the block that joins them."""

from headway.nn.adapters import (
    Adapter,
    adapted,
    adapter_names,
    attach,
    block_linears,
    merge,
    named_adapter_parameters,
    set_active,
    target_layers,
    unmerge,
)
from headway.nn.attention import (
    Attention,
    AttentionLayer,
    AttentionOptions,
    GlobalAttention,
)
from headway.nn.block import ORDERS, Block, Order
from headway.nn.cross_entropy import IGNORE_INDEX, Losses
from headway.nn.embeddings import PositionEmbedding, TokenEmbedding, check_ids
from headway.nn.feedforward import FeedForward, GatedFeedForward, named_activation, swish
from headway.nn.fused import ACTIVATIONS, Norm
from headway.nn.kept import Keeps, kept_as
from headway.nn.linear import Linear, linears
from headway.nn.linear_attention import LinearAttention, LinearMixer
from headway.nn.lora import Lora, LowRank, merged_weight
from headway.nn.mixers import GlobalMixer, Mixer, SoftmaxMixer
from headway.nn.norms import NORMS, LayerNorm, RMSNorm, make_norm
from headway.nn.output import output_cross_entropy
from headway.nn.positions import RotaryEmbedding, Scores
from headway.nn.share import Share
from headway.nn.weights import (
    WEIGHTS,
    BlockQuantized,
    CompressedWeight,
    Int4,
    Int8,
    Nf4,
    Packed,
    Plain,
    Rounded,
    Weight,
    code_bytes,
    from_codes,
)

__all__ = [
    "ACTIVATIONS",
    "IGNORE_INDEX",
    "NORMS",
    "ORDERS",
    "WEIGHTS",
    "Adapter",
    "Attention",
    "AttentionLayer",
    "AttentionOptions",
    "Block",
    "BlockQuantized",
    "CompressedWeight",
    "FeedForward",
    "GatedFeedForward",
    "GlobalAttention",
    "GlobalMixer",
    "Int4",
    "Int8",
    "Keeps",
    "LayerNorm",
    "Linear",
    "LinearAttention",
    "LinearMixer",
    "Lora",
    "Losses",
    "LowRank",
    "Mixer",
    "Nf4",
    "Norm",
    "Order",
    "Packed",
    "Plain",
    "PositionEmbedding",
    "RMSNorm",
    "RotaryEmbedding",
    "Rounded",
    "Scores",
    "Share",
    "SoftmaxMixer",
    "TokenEmbedding",
    "Weight",
    "adapted",
    "adapter_names",
    "attach",
    "block_linears",
    "check_ids",
    "code_bytes",
    "from_codes",
    "kept_as",
    "linears",
    "make_norm",
    "merge",
    "merged_weight",
    "named_activation",
    "named_adapter_parameters",
    "output_cross_entropy",
    "set_active",
    "swish",
    "target_layers",
    "unmerge",
]
