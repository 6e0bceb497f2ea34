"""Which layers of a model may attend with our kernels: those whose attention function computes what ours does.

Legend: B rows, H query heads, K kv heads, T tokens, D per head.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from headway.integrations.transformers.interface import Seen, attention
from headway.integrations.transformers.modules import (
    ATTENTION,
    SEED,
    TOLERANCE,
    code,
    code_of,
    codes,
    relative,
    rotary_codes,
)
from headway.integrations.transformers.operators import rotary
from headway.patterns import Causal, Full, Pattern, Window
from headway.tokens import Tokens

TOKENS, WINDOW = 7, 3
"""Of the sample."""


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that ask their config for an attention function, by name."""
    names = {"ALL_ATTENTION_FUNCTIONS", "get_interface"}
    return {
        name: module
        for name, module in model.named_modules()
        if (code := getattr(type(module).forward, "__code__", None)) and names <= {*code.co_names}
    }


@cache
def with_rotary(forward: FunctionType) -> FunctionType:
    """The same function, with our rotation under the name of its own."""
    names = {**forward.__globals__, "apply_rotary_pos_emb": rotary}
    made = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def rotary_forward(layer: nn.Module) -> FunctionType | None:
    """What takes the place of a known layer's forward so that queries and keys are rotated by us; None where its own
    rotation is none, unknown or not equal to ours on random numbers."""
    forward: Any = type(layer).forward
    own = forward.__globals__.get("apply_rotary_pos_emb")
    if code_of(layer) not in codes(ATTENTION) or own is None or code(own) not in rotary_codes():
        return None
    seed = torch.Generator().manual_seed(SEED)
    q, k = (torch.randn(2, heads, TOKENS, 8, generator=seed) for heads in (4, 2))
    angles = torch.randn(2, TOKENS, 4, generator=seed)
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    found = max(relative(a, b) for a, b in zip(rotary(q, k, cos, sin), own(q, k, cos, sin), strict=True))
    return with_rotary(forward) if found <= TOLERANCE else None


def unsupported_reason(layer: nn.Module) -> str | None:
    """Why a layer may not have our attention function; None if it may."""
    if code_of(layer) not in codes(ATTENTION):
        return f"attention of an unknown class, {type(layer).__name__}"
    found = max(_difference(layer, pattern) for pattern in (Full(), Causal(), Window.last(WINDOW)))
    return (
        None
        if found <= TOLERANCE
        else f"its attention differs from ours by {found:.1g} of the largest number"
    )


def _difference(layer: Any, pattern: Pattern) -> float:
    """The largest difference between a layer's own attention and ours, over the largest number: of outputs and
    gradients, in float32."""
    own = type(layer).forward.__globals__["eager_attention_forward"]
    width = getattr(layer, "head_dim", None) or layer.attention_head_size
    group = getattr(layer, "num_key_value_groups", 1)
    seed = torch.Generator().manual_seed(SEED)
    given = [torch.randn(2, heads, TOKENS, width, generator=seed) for heads in (2 * group, 2, 2)]
    back = torch.randn(2, TOKENS, 2 * group, width, generator=seed)
    tokens = Tokens.range(TOKENS, device="cpu")
    allowed = pattern.allows(tokens, tokens)
    drawn = torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(~allowed, torch.finfo(torch.float32).min)
    named = {"scaling": layer.scaling}
    if (cap := getattr(layer, "attn_logit_softcapping", None)) is not None:
        named["softcap"] = cap

    def run(function: Any, mask: Tensor) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in given]
        with torch.enable_grad():
            out = function(layer, *leaves, mask, dropout=0.0, **named)[0]
            return [out.detach(), *torch.autograd.grad(out, leaves, back)]

    ours = run(attention, Seen.of(2, pattern, tokens, tokens))
    return max(relative(a, b) for a, b in zip(ours, run(own, drawn), strict=True))
