"""Whether a step of decoding can be one native call: see `headway.models.decode_step`."""

from __future__ import annotations

import torch

from headway.attention.backends.native.backend import NATIVE
from headway.attention.select import AUTO
from headway.cache import DecoderCache, KVCache
from headway.models.decoder import Decoder
from headway.native import interface as c
from headway.native.loader import library, why_missing
from headway.nn.adapters import named_adapter_parameters
from headway.nn.attention import Attention
from headway.nn.block import Block
from headway.nn.feedforward import FeedForward
from headway.nn.linear import Linear, linears
from headway.nn.mixers import SoftmaxMixer
from headway.positions import Rotary


def unsupported_reason(model: Decoder, cache: DecoderCache) -> str | None:
    """Why steps of this model cannot be native calls; None if they can."""
    if library() is None:
        return why_missing() or "the native kernels are not loaded"
    adapters = {id(p) for _, p in named_adapter_parameters(model)}
    weights = {(p.dtype, p.device.type) for p in model.parameters() if id(p) not in adapters}
    if weights not in ({(torch.float32, "cpu")}, {(torch.bfloat16, "cpu")}):
        return "its kernels take weights of one type, float32 or bf16, on the CPU"
    if any(not isinstance(layer, KVCache) or layer.dtype != model.model.like.dtype for layer in cache.layers):
        return "its kernels write caches of keys and values in the type of the weights"
    if model.spec.logit_scale != 1.0 or model.model.scores.steps or model.model.norm is None:
        return "its kernels know no scores that layers share, no scaled logits, and want a last norm"
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return "its modules have hooks, which the kernels would not call"
    layers = linears(model).values()
    reasons = (reason for layer in layers if (reason := odd_linear(layer)))
    return next(reasons, None) or next(
        (reason for block in model.model.blocks if (reason := _odd_block(block))), None
    )


def odd_linear(layer: Linear) -> str | None:
    """Why the kernels cannot take a linear layer; None if they can."""
    if layer.share is not None:
        return "its kernels know no layers that processes share"
    if any(part.lora.magnitude for part in layer.beside):
        return "its kernels know no adapters with magnitudes (DoRA); merge them (headway surgery merge)"
    matrix = layer.kept.native()
    return matrix if isinstance(matrix, str) else None


def _odd_block(block: Block) -> str | None:
    layer = block.self_attn
    if type(layer) is not Attention or type(layer.mixer) is not SoftmaxMixer or block.cross_attn is not None:
        return "its kernels know softmax attention to a decoder's own past"
    if block.order == "post":
        return "its kernels know norms in front of layers, not behind them"
    if layer.score.steps or len(layer.pattern.heads) > 1 or layer.mixer.backend not in (AUTO, NATIVE.name):
        return "its kernels know no scores, no pattern of each head, and no other backend"
    if max(layer.head_dim, layer.value_dim) > c.WIDEST:
        return f"its kernels take heads of 1 to {c.WIDEST}"
    if layer.rotary.rotates and (
        type(layer.positions) is not Rotary or layer.rotary.frequency_offset is not None
    ):
        return "its kernels know rotary positions that are not trained"
    if layer.positions.length_dependent:
        return "its kernels know no rotation that depends on the length"
    mlp = block.mlp
    if mlp is not None and (not isinstance(mlp, FeedForward) or mlp.act not in c.ACTIVATIONS):
        return "its kernels do not know this activation"
    return None
