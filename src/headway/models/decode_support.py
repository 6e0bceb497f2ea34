"""Whether a step of decoding can be one native call: see `headway.models.decode_step`."""

from __future__ import annotations

import torch

from headway.attention.backends.native.backend import NATIVE
from headway.attention.select import AUTO
from headway.cache import DecoderCache, KVCache
from headway.models.decoder import Decoder
from headway.native import interface as c
from headway.native.loader import library, why_missing
from headway.nn.attention import Attention
from headway.nn.block import Block
from headway.nn.compressed import CompressedLinear
from headway.nn.feedforward import FeedForward
from headway.nn.linear import Linear, OutputLayer
from headway.nn.mixers import SoftmaxMixer
from headway.nn.quantized import QuantizedLinear
from headway.positions import Rotary


def unsupported_reason(model: Decoder, cache: DecoderCache) -> str | None:
    """Why steps of this model cannot be native calls; None if they can."""
    if library() is None:
        return why_missing() or "the native kernels are not loaded"
    weights = {(p.dtype, p.device.type) for p in model.parameters()}
    if weights not in ({(torch.float32, "cpu")}, {(torch.bfloat16, "cpu")}):
        return "its kernels take weights of one type, float32 or bf16, on the CPU"
    if any(
        not isinstance(layer, KVCache) or layer.dtype != model.model.embedding.dtype for layer in cache.layers
    ):
        return "its kernels write caches of keys and values in the type of the weights"
    if model.spec.logit_scale != 1.0 or model.model.scores.steps or model.model.norm is None:
        return "its kernels know no scores that layers share, no scaled logits, and want a last norm"
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return "its modules have hooks, which the kernels would not call"
    if type(model.lm_head) not in (OutputLayer, QuantizedLinear, CompressedLinear):
        return f"its kernels know no layer {type(model.lm_head).__name__}"
    return next((reason for block in model.model.blocks if (reason := _odd_block(block))), None)


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
    narrow = () if mlp is None else (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    layers = layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj, *narrow
    kinds = {type(one) for one in layers if one is not None} - {Linear, QuantizedLinear, CompressedLinear}
    return f"its kernels know no layer {kinds.pop().__name__}" if kinds else None
