"""Backend `sdpa`: torch's fused kernels, for what they are made for.

A key set is lowered to one of four forms: "full" (no mask), "causal" (queries and keys are the same slots),
"chunk" (a causal chunk after a past: the past is full, the chunk causal, the two are merged) and "mask" (any
other pattern, as a dense boolean mask of T x S: correct, and paid for in full).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.attention.call import Call, split
from headway.attention.key_values import KeyValues
from headway.attention.plan import simplified
from headway.attention.twice import no_second
from headway.partial import Partial, merge_all
from headway.patterns import Causal, Full


def form(call: Call, part: KeyValues) -> str:
    """How this key set is lowered: "full", "causal", "chunk" or "mask"."""
    if call.keep is not None or any(s.by_slot for s in call.score):
        return "mask"
    q, k = call.q_tokens, part.tokens
    if q.start is None or k.start is None or not q.count:
        return "mask"
    pattern = simplified(call.pattern, q, k)
    if pattern == Full():
        return "full"
    if pattern == Causal() and q.start >= k.start and q.start + q.count == k.start + k.count:
        return "causal" if q.start == k.start else "chunk"
    return "mask"


def unsupported_reason(call: Call) -> str | None:
    """Why torch's kernels cannot run this call, beside what the table of abilities says; None if they can."""
    return "a causal mask with a scale of 0 or less gives NaN there" if call.scale <= 0 else None


def run(call: Call, with_lse: bool = True) -> Partial:
    """Partial over all key sets. Without `with_lse`, lse of one key set is NaN and torch's autograd applies."""
    if not with_lse and len(call.keys) == 1:
        (part,) = call.keys
        out = _output(call, part)
        return Partial(out, out.new_full(out.shape[:-1], float("nan")))
    return merge_all([p for part in call.keys for p in _partials(call, part)])


def _output(call: Call, part: KeyValues) -> Tensor:
    q, k, v = call.q, part.k, part.v
    shape = form(call, part)
    gqa = call.heads.group > 1
    if shape == "full" and gqa and q.shape[2] <= 16:
        rows = _fused(call.grouped(q).flatten(2, 3), k, v, scale=call.scale)
        return split(rows, 2, call.heads.group, q.shape[2]).flatten(1, 2)
    if shape in ("full", "causal"):
        return _fused(q, k, v, is_causal=shape == "causal", scale=call.scale, enable_gqa=gqa)
    if shape == "chunk" and not call.needs_grad and q.device.type == "cpu":
        return merge_all(_partials(call, part)).out
    mask, k, v, some = _masked(call, part)
    if call.needs_grad:  # NaN in a query that sees nothing would reach every gradient
        q = q.masked_fill(~some, 0.0)
    out = _fused(q, k, v, attn_mask=mask, scale=call.scale, enable_gqa=gqa)
    return out.masked_fill(~some, 0.0)


def _fused(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """torch's `scaled_dot_product_attention`, whose kernels have no second derivatives and then say so in our words."""
    out = F.scaled_dot_product_attention(q, k, v, **how)
    if out.grad_fn is not None and not torch.compiler.is_compiling():
        out.grad_fn.register_hook(_mark_once)
    return out


def _mark_once(made: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
    """Hook of a backward: where torch put an error behind the gradients that it made, ours comes before."""
    for node in {t.grad_fn for t in made if t is not None and t.grad_fn is not None}:
        if node.name() == "torch::autograd::NotImplemented":
            node.register_prehook(_refuse)


def _refuse(grads: Sequence[Tensor | None]) -> None:
    raise no_second("sdpa")


def _partials(call: Call, part: KeyValues) -> list[Partial]:
    q, k, v = call.q, part.k, part.v
    shape = form(call, part)
    if shape == "full" and call.heads.group > 1:
        both = _flash(call.grouped(q).flatten(2, 3), k, v, call.scale)
        group = (call.heads.group, -1)
        return [
            Partial(both.out.unflatten(2, group).flatten(1, 2), both.lse.unflatten(2, group).flatten(1, 2))
        ]
    if shape in ("full", "causal"):
        return [_flash(q, k, v, call.scale, causal=shape == "causal")]
    if shape == "chunk":
        past = k.shape[2] - q.shape[2]
        return [
            *_partials(call, part.slice(0, past)),
            *_partials(call, part.slice(past, k.shape[2])),
        ]
    mask, k, v, some = _masked(call, part)
    additive = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
    both = _flash(q, k, v, call.scale, mask=additive)
    some = some.expand(*both.out.shape[:-1], 1)
    out = both.out.masked_fill(~some, 0.0)
    return [Partial(out, both.lse.masked_fill(~some.squeeze(-1), float("-inf")))]


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, mask: Tensor | None = None
) -> Partial:
    """torch's CPU kernel, called by its own name because only that returns the logsumexp (natural log)."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return Partial(out, lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32))


def _masked(call: Call, part: KeyValues) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(mask, k, v, some): a mask without empty rows, keys with unseen slots set to 0, which rows see any."""
    mask = call.visible(call.q_tokens, part.tokens)
    if call.keep is not None:
        mask = mask & call.keep
    seen = mask.any(-2)
    if seen.shape[1] > 1:
        seen = seen.unflatten(1, (call.heads.kv_heads, -1)).any(2)
    unseen = ~seen.unsqueeze(-1)
    some = mask.any(-1, keepdim=True)
    return mask | ~some, part.k.masked_fill(unseen, 0.0), part.v.masked_fill(unseen, 0.0), some
