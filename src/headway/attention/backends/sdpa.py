"""Backend `sdpa`: torch's fused kernels, for the masks that they support.

A key set is lowered to one of four forms: "full" (no mask), "causal" (queries and keys are the same slots), "chunk"
(queries that continue a past: full attention to the past and causal attention among themselves, merged) and "mask" (any
other pattern, as a dense boolean mask of T x S: correct, but at full cost).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.attention.autograd import no_second_derivative
from headway.attention.backends.base import CPU, Backend, Capabilities, Repeated
from headway.attention.call import Call, split
from headway.attention.key_values import KeyValues
from headway.partial import Partial, merge_all, work_dtype
from headway.patterns import Causal, Full
from headway.patterns.program import simplified

SMALL_MASK = 2**16
"""Most pairs of a mask that is kept for repeated calls."""


def form(call: Call, part: KeyValues) -> str:
    """Returns the form to which this key set is lowered: "full", "causal", "chunk" or "mask"."""
    q, k = call.q_tokens, part.tokens
    masked = call.keep is not None or any(s.by_slot for s in call.score)
    if masked or q.start is None or k.start is None or not q.document is k.document is None or not q.count:
        return "mask"
    pattern = simplified(call.pattern, q, k)
    if pattern == Full():
        return "full"
    if pattern == Causal() and q.start >= k.start and q.start + q.count == k.start + k.count:
        return "causal" if q.start == k.start else "chunk"
    return "mask"


def limits(call: Call, device: str) -> str | None:
    """Returns why torch's kernels cannot run this call, or None if they can."""
    return f"torch's causal mask gives NaN for scale={call.scale:g} (0 or less)" if call.scale <= 0 else None


def forward(call: Call, lse: bool = True) -> Partial:
    """Returns the partial over all key sets. Without `lse`, the lse of a single key set is NaN, and torch
    differentiates it."""
    if lse or len(call.keys) > 1:
        return merge_all([p for number in range(len(call.keys)) for p in _partials(call, number)])
    shape = form(call, call.keys[0])
    if shape == "chunk" and not call.needs_grad and call.q.device.type == "cpu":
        return _without_lse(merge_all(_partials(call, 0)).out)
    return _prepared(call, shape)(call.q, call.keys[0])


def repeat(call: Call, lse: bool) -> Repeated | None:
    """Returns a function that repeats a call without gradient and logsumexp on other tensors, building its mask only
    once. Returns None if the logsumexp is needed, for form "chunk", and for masks of more than `SMALL_MASK` pairs."""
    shape, pairs = form(call, call.keys[0]), call.q.shape[2] * call.keys[0].k.shape[2]
    return (
        None
        if lse or shape == "chunk" or (shape == "mask" and pairs > SMALL_MASK)
        else _prepared(call, shape)
    )


def _prepared(call: Call, shape: str) -> Repeated:
    """Returns the function that computes the result over one key set, without its lse."""
    seen = None if shape in ("full", "causal") else _Seen.of(call, 0)
    causal, scale = shape == "causal", call.scale
    return lambda q, keys: _without_lse(_output(q, keys, scale, causal, seen))


def _without_lse(out: Tensor) -> Partial:
    return Partial(out, out.new_full(out.shape[:-1], float("nan")))


class _Seen(NamedTuple):
    """A mask [B|1, H|1, T, S] in which queries that see nothing see everything, the slots that no query sees, [B|1,
    K|1, S, 1], and the queries that see nothing, [B|1, H|1, T, 1]."""

    mask: Tensor
    unseen: Tensor
    blind: Tensor

    @staticmethod
    def of(call: Call, number: int) -> "_Seen":
        mask, unseen = call.seen(number)
        blind = ~mask.any(-1, keepdim=True)
        return _Seen(mask | blind, unseen, blind)


def _output(q: Tensor, part: KeyValues, scale: float, causal: bool, seen: _Seen | None) -> Tensor:
    """Returns the result alone. Without `seen`, queries see every key, or with `causal` those up to their own."""
    k, v, group = part.k, part.v, q.shape[1] // part.k.shape[1]
    if seen is None:
        if group > 1 and not causal and q.shape[2] <= 16:
            rows = _fused(split(q, 1, -1, group).flatten(2, 3), k, v, scale=scale)
            return split(rows, 2, group, q.shape[2]).flatten(1, 2)
        return _fused(q, k, v, is_causal=causal, scale=scale, enable_gqa=group > 1)
    k, v = k.masked_fill(seen.unseen, 0.0), v.masked_fill(seen.unseen, 0.0)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        q = q.masked_fill(seen.blind, 0.0)  # NaN in a query that sees nothing would reach every gradient
    out = _fused(q, k, v, attn_mask=seen.mask, scale=scale, enable_gqa=group > 1)
    return out.masked_fill(seen.blind, 0.0)


def _fused(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Calls torch's `scaled_dot_product_attention`. Its kernels have no second derivatives; asking for them raises
    this package's error."""
    out = F.scaled_dot_product_attention(q, k, v, **how)
    if out.grad_fn is not None and not torch.compiler.is_compiling():
        out.grad_fn.register_hook(_mark_once)
    return out


def _mark_once(grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> None:
    """Runs in the backward: if the gradients of the inputs have a node of torch that raises when they are
    differentiated, makes it raise this package's error first."""
    for node in {t.grad_fn for t in grad_inputs if t is not None and t.grad_fn is not None}:
        if node.name() == "torch::autograd::NotImplemented":
            node.register_prehook(_refuse)


def _refuse(grads: Sequence[Tensor | None]) -> None:
    raise no_second_derivative("sdpa")


def _partials(call: Call, number: int) -> list[Partial]:
    part, group = call.keys[number], call.heads.group
    q, k, v, shape = call.q, part.k, part.v, form(call, part)
    if shape == "full" and group > 1:
        rows = _flash(call.grouped(q).flatten(2, 3), k, v, call.scale)
        return [Partial(*(split(t, 2, group, q.shape[2]).flatten(1, 2) for t in (rows.out, rows.lse)))]
    if shape in ("full", "causal"):
        return [_flash(q, k, v, call.scale, causal=shape == "causal")]
    if shape == "chunk":
        past = k.shape[2] - q.shape[2]
        sets = replace(call, keys=(part.slice(0, past), part.slice(past, k.shape[2])))
        return [*_partials(sets, 0), *_partials(sets, 1)]
    mask, unseen, blind = _Seen.of(call, number)
    k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
    additive = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
    masked = _flash(q, k, v, call.scale, mask=additive)
    return [
        Partial(masked.out.masked_fill(blind, 0.0), masked.lse.masked_fill(blind.squeeze(-1), float("-inf")))
    ]


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, mask: Tensor | None = None
) -> Partial:
    """Calls torch's CPU kernel directly, because only this operator returns the logsumexp (natural log)."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return Partial(out, lse.to(work_dtype(q.dtype)))


SDPA = Backend(
    name="sdpa",
    about="torch's fused kernels for full and causal patterns",
    forward=forward,
    capabilities=Capabilities(
        dropout=False, scores=False, keep=True, value_width=False, lse=CPU, lse_gradient=False
    ),
    limits=limits,
    repeat=repeat,
)
