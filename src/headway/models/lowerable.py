"""What of a model is no operation of the native kernels, and why.

Legend: H query heads.
"""

from collections.abc import Sequence

import torch

from headway.attention import KeyValues
from headway.attention.backends.native.backend import NATIVE
from headway.attention.call import Call, validate
from headway.attention.select import AUTO
from headway.models.decoder import Decoder
from headway.models.encoder_decoder import EncoderDecoder
from headway.models.operations import NotLowered
from headway.models.stack import TransformerStack
from headway.native.loader import library, why_missing
from headway.nn.adapters import named_adapter_parameters
from headway.nn.attention import Attention
from headway.nn.attention_layer import AttentionLayer
from headway.nn.mixers import SoftmaxMixer
from headway.nn.positions import Scores
from headway.patterns import Causal
from headway.tokens import Tokens


def check_parts(model: Decoder | EncoderDecoder, stack: TransformerStack) -> None:
    """Raises NotLowered for what is no part of a block."""
    if library() is None:
        raise NotLowered(why_missing() or "the native kernels are not loaded")
    adapters = {id(p) for part in (stack, model.lm_head) for _, p in named_adapter_parameters(part)}
    parameters = [p for part in (stack, model.lm_head) for p in part.parameters() if id(p) not in adapters]
    if {(p.dtype, p.device.type) for p in parameters} not in (
        {(torch.float32, "cpu")},
        {(torch.bfloat16, "cpu")},
    ):
        raise NotLowered("the kernels take weights of one type, float32 or bf16, on the CPU")
    modules = [model, *stack.modules(), *model.lm_head.modules()]
    if any(module._forward_hooks or module._forward_pre_hooks for module in modules):
        raise NotLowered("its modules have hooks, which the kernels would not call")


def softmax_call(
    layer: AttentionLayer, scores: Sequence[Scores], dtype: torch.dtype, *, across: bool = False
) -> Call:
    """The call of one token by which a layer attends, or `across`: to a source, all of which its last token sees.

    Raises NotLowered where that is not what the kernels do."""
    mixer = layer.mixer
    if type(layer) is not Attention or type(mixer) is not SoftmaxMixer:
        raise NotLowered(f"the kernels know softmax attention, and no {type(layer).__name__}")
    if len(layer.pattern.heads) > 1:
        raise NotLowered("the kernels know one pattern for all heads of a layer")
    if mixer.backend not in (AUTO, NATIVE.name):
        raise NotLowered(f"attention by the backend {mixer.backend} is asked for")
    q = torch.zeros(1, layer.heads.query_heads, 1, layer.head_dim, dtype=dtype)
    k, v = (q.new_zeros(1, layer.heads.kv_heads, 1, size) for size in (layer.head_dim, layer.value_dim))
    tokens, steps = Tokens.range(1), tuple(step for some in scores for step in some())
    pattern = Causal() if across else mixer.pattern
    call = validate(q, tokens, [KeyValues(k, v, tokens)], pattern, None, steps, mixer.scale, 0.0, None)
    if reason := NATIVE.unsupported_reason(call, False, "cpu"):
        raise NotLowered(f"native attention: {reason}")
    return call
