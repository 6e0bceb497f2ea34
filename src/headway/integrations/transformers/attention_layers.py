"""Decides which layers of a model may use headway's attention: those that call the attention function of their config,
pass it no unknown arguments, and whose own attention gives equal results.

Legend: B rows, H query heads, K kv heads, T tokens, D per head, d <= D rotated numbers.
"""

from functools import cache
from inspect import signature, unwrap
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import HeadwayError
from headway.integrations.transformers import modules
from headway.integrations.transformers.interface import SAID_ELSEWHERE, Seen, attention
from headway.integrations.transformers.modules import ATTENTION, SEED, TOLERANCE, calls, code, names_of
from headway.nn import fused
from headway.patterns import Causal, Full, Pattern, Window
from headway.tokens import Tokens

TOKENS, WINDOW, WIDTH = 7, 3, 8
"""Sizes of the sample: tokens, a window, and numbers per head."""
ROTATION = "apply_rotary_pos_emb"
HONOURED = {*signature(attention).parameters, *SAID_ELSEWHERE, "output_attentions"}
"""The arguments that our attention function honours, refuses when used, or may ignore."""


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Returns q and k [B, H, T, D] with the first d numbers (x1, x2) of each head rotated: x cos + (-x2, x1) sin. cos
    and sin are [B or 1, T, d], without gradient."""
    assert unsqueeze_dim == 1, unsqueeze_dim
    first, second = sin.chunk(2, -1)
    turned = fused.rotate((q, k), cos, torch.cat((-first, second), -1), "halves")
    return turned[0], turned[1]


@cache
def with_rotary(forward: FunctionType) -> FunctionType:
    """Returns a copy of the function that calls our rotation in place of its own."""
    names = {**forward.__globals__, ROTATION: rotary}
    function = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    function.__kwdefaults__ = forward.__kwdefaults__
    return function


def rotary_forward(layer: nn.Module) -> FunctionType | None:
    """Returns a layer's forward with our rotation of queries and keys; None if its own rotation is absent, unknown, or
    not equal to ours on random numbers."""
    forward: Any = type(layer).forward
    theirs, sites = forward.__globals__.get(ROTATION), calls(forward, ROTATION)
    if theirs is None or code(forward) is None or code(theirs) not in modules.rotary_codes():
        return None
    if not sites or any(len(call.args) != 4 or call.keywords for call in sites):  # not (q, k, cos, sin)
        return None
    seed = torch.Generator().manual_seed(SEED)
    q, k = (torch.randn(2, heads, TOKENS, 8, generator=seed) for heads in (4, 2))
    angles = torch.randn(2, TOKENS, 4, generator=seed)
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    rotated = zip(rotary(q, k, cos, sin), theirs(q, k, cos, sin), strict=True)
    worst = max(modules.relative(a, b) for a, b in rotated)
    return with_rotary(forward) if worst <= TOLERANCE else None


def unsupported_reason(layer: nn.Module) -> str | None:
    """Returns why a layer may not use our attention function; None if it may."""
    unknown = [names_of(call) - HONOURED for call in calls(type(layer).forward, ATTENTION)]
    if not unknown:
        return f"attention of {type(layer).__name__}, whose code cannot be read"
    if fewest := min(unknown, key=len):
        return f"its attention depends on {', '.join(sorted(fewest))}, which ours does not know"
    try:
        worst = max(_difference(layer, pattern) for pattern in (Full(), Causal(), Window.last(WINDOW)))
    except Exception as error:  # foreign code may raise anything
        return f"its attention cannot be compared with ours: {error}"
    if worst <= TOLERANCE:
        return None
    return f"its attention differs from ours by {worst:.1g} of the largest number"


@torch.no_grad()
def trial_error(model: Any) -> str | None:
    """Returns the error of our attention in a forward pass over a few tokens with padding; None if there is none, or if
    the model needs other inputs than tokens."""
    ids = torch.arange(TOKENS, device=model.device).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()(**inputs)
    except HeadwayError as error:
        return str(error)
    except Exception:  # the model needs other inputs, which are not known here
        return None
    finally:
        for module, mode in modes:
            module.training = mode
    return None


def _difference(layer: Any, pattern: Pattern) -> float:
    """Returns the largest difference between a layer's own attention and ours, relative to the largest number, over
    outputs and gradients in float32."""
    theirs = unwrap(type(layer).forward).__globals__["eager_attention_forward"]
    group, sinks = getattr(layer, "num_key_value_groups", 1), getattr(layer, "sinks", None)
    shared = 2 if sinks is None else len(sinks) // group  # the layer has a sink for each of its heads
    seed = torch.Generator().manual_seed(SEED)
    tensors = [
        torch.randn(2, heads, TOKENS, WIDTH, generator=seed) for heads in (shared * group, shared, shared)
    ]
    tokens = Tokens.range(TOKENS, device="cpu")
    allowed = pattern.allows(tokens, tokens)
    drawn = torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(~allowed, torch.finfo(torch.float32).min)
    named = {"dropout": 0.0, "scaling": getattr(layer, "scaling", WIDTH**-0.5)}
    if (cap := getattr(layer, "attn_logit_softcapping", None)) is not None:
        named["softcap"] = cap
    if sinks is not None:
        named["s_aux"] = sinks.detach().float()
    return modules.differentiated(
        lambda q, k, v: attention(layer, q, k, v, Seen.of(2, pattern, tokens, tokens), **named),
        lambda q, k, v: theirs(layer, q, k, v, drawn, **named),
        *tensors,
    )
