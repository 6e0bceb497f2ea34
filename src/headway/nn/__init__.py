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
    LinearAttention,
)
from headway.nn.block import ORDERS, Block, Order
from headway.nn.compressed import CompressedLinear
from headway.nn.cross_entropy import IGNORE_INDEX, Losses
from headway.nn.embeddings import PositionEmbedding, TokenEmbedding, check_ids
from headway.nn.feedforward import FeedForward, GatedFeedForward, named_activation, swish
from headway.nn.fused import ACTIVATIONS, Norm
from headway.nn.linear import Linear, OutputLayer, output_cross_entropy, replace_linear
from headway.nn.lora import Lora, LoraLinear, merged_weight
from headway.nn.mixers import GlobalMixer, LinearMixer, Mixer, SoftmaxMixer
from headway.nn.nf4 import Nf4, Nf4Linear
from headway.nn.norms import NORMS, LayerNorm, RMSNorm, make_norm
from headway.nn.parallel import ColumnParallelLinear, RowParallelLinear
from headway.nn.positions import RotaryEmbedding, Scores
from headway.nn.quantized import QuantizedLinear

__all__ = [
    "ACTIVATIONS",
    "IGNORE_INDEX",
    "NORMS",
    "ORDERS",
    "Adapter",
    "Attention",
    "AttentionLayer",
    "AttentionOptions",
    "Block",
    "ColumnParallelLinear",
    "CompressedLinear",
    "FeedForward",
    "GatedFeedForward",
    "GlobalAttention",
    "GlobalMixer",
    "LayerNorm",
    "Linear",
    "LinearAttention",
    "LinearMixer",
    "Lora",
    "LoraLinear",
    "Losses",
    "Mixer",
    "Nf4",
    "Nf4Linear",
    "Norm",
    "Order",
    "OutputLayer",
    "PositionEmbedding",
    "QuantizedLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "RowParallelLinear",
    "Scores",
    "SoftmaxMixer",
    "TokenEmbedding",
    "adapted",
    "adapter_names",
    "attach",
    "block_linears",
    "check_ids",
    "make_norm",
    "merge",
    "merged_weight",
    "named_activation",
    "named_adapter_parameters",
    "output_cross_entropy",
    "replace_linear",
    "set_active",
    "swish",
    "target_layers",
    "unmerge",
]
