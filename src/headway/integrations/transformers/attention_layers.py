"""Which layers of a model may attend with our kernels: those that ask for an attention function, give it nothing that
ours does not know, and have one that computes what ours does.

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
"""The arguments of an attention function that ours honours, refuses when they are used, or may leave out."""


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """x cos + (-x2, x1) sin on the first d numbers (x1, x2) of each head of q and k [B, H, T, D]; cos and sin
    [B or 1, T, d], without gradient."""
    assert unsqueeze_dim == 1, unsqueeze_dim
    first, second = sin.chunk(2, -1)
    turned = fused.rotate((q, k), cos, torch.cat((-first, second), -1), "halves")
    return turned[0], turned[1]


@cache
def with_rotary(forward: FunctionType) -> FunctionType:
    """The same function, with our rotation under the name of its own."""
    names = {**forward.__globals__, ROTATION: rotary}
    function = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    function.__kwdefaults__ = forward.__kwdefaults__
    return function


def rotary_forward(layer: nn.Module) -> FunctionType | None:
    """A layer's forward with queries and keys rotated by our function; None where its own rotation is absent, unknown
    or not equal to ours on random numbers."""
    forward: Any = type(layer).forward
    theirs, sites = forward.__globals__.get(ROTATION), calls(forward, ROTATION)
    if theirs is None or code(forward) is None or code(theirs) not in modules.rotary_codes():
        return None
    if not sites or any(len(call.args) != 4 or call.keywords for call in sites):  # q, k, cos, sin
        return None
    seed = torch.Generator().manual_seed(SEED)
    q, k = (torch.randn(2, heads, TOKENS, 8, generator=seed) for heads in (4, 2))
    angles = torch.randn(2, TOKENS, 4, generator=seed)
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    turned = zip(rotary(q, k, cos, sin), theirs(q, k, cos, sin), strict=True)
    worst = max(modules.relative(a, b) for a, b in turned)
    return with_rotary(forward) if worst <= TOLERANCE else None


def unsupported_reason(layer: nn.Module) -> str | None:
    """Why a layer may not have our attention function; None if it may."""
    unknown = [names_of(call) - HONOURED for call in calls(type(layer).forward, ATTENTION)]
    if not unknown:
        return f"attention of {type(layer).__name__}, whose code cannot be read"
    if fewest := min(unknown, key=len):
        return f"its attention depends on {', '.join(sorted(fewest))}, which ours does not know"
    try:
        worst = max(_difference(layer, pattern) for pattern in (Full(), Causal(), Window.last(WINDOW)))
    except Exception as error:  # code that is not ours may raise anything
        return f"its attention cannot be compared with ours: {error}"
    if worst <= TOLERANCE:
        return None
    return f"its attention differs from ours by {worst:.1g} of the largest number"


@torch.no_grad()
def trial_error(model: Any) -> str | None:
    """The error of our attention in a forward of some tokens with padding; None where there is none, or where the model
    cannot read tokens alone."""
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
    """The largest difference between a layer's own attention and ours, over the largest number: of outputs and
    gradients, in float32."""
    theirs = unwrap(type(layer).forward).__globals__["eager_attention_forward"]
    group, sinks = getattr(layer, "num_key_value_groups", 1), getattr(layer, "sinks", None)
    shared = 2 if sinks is None else len(sinks) // group  # sinks are of all heads
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
