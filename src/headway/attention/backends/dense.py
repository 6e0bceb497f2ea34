"""Backend `dense`: the specification. Full scores, any device and dtype, differentiable as often as you like."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.attention.call import Call
from headway.attention.key_values import KeyValues
from headway.partial import Partial, merge_all


def run(call: Call) -> Partial:
    """Partial over all key sets; scores and sums in float32 (float64 for float64 inputs)."""
    return merge_all([_one(call, part, slot) for part, slot in zip(call.keys, call.slots, strict=True)])


def _one(call: Call, part: KeyValues, slot: int) -> Partial:
    scores, mask = _scores(call, part, slot)
    dtype = call.work_dtype
    top = (
        scores.detach().amax(-1, keepdim=True)
        if part.tokens.count
        else scores.new_full((*scores.shape[:3], 1), 0)
    )
    top = top.masked_fill(top == float("-inf"), 0.0)
    p = torch.exp(scores - top)
    total = p.sum(-1, keepdim=True)
    some = total > 0
    safe = torch.where(some, total, 1.0)
    lse = torch.where(some, torch.log(safe) + top, float("-inf")).squeeze(-1)
    p = p / safe
    if call.dropout:
        p = p * call.dropped(_arange(call.q, 2), _arange(part.k, 2) + slot, dtype)
    v = part.v.to(dtype).masked_fill(_unseen(call, mask), 0.0)
    out = call.grouped(p).flatten(2, 3) @ v
    out = out.unflatten(2, (call.heads.group, -1)).flatten(1, 2)
    return Partial(out.to(call.q.dtype), lse)


def weights(call: Call) -> Tensor:
    """Attention weights [B, H, T, S] of one key set, before dropout; a row that sees nothing is all 0."""
    (part,) = call.keys
    scores, _ = _scores(call, part, 0)
    return torch.softmax(scores, -1).nan_to_num(0.0) if part.tokens.count else scores


def _scores(call: Call, part: KeyValues, slot: int) -> tuple[Tensor, Tensor]:
    """Scores [B, H, T, S] with -inf where masked, and the mask [B|1, H|1, T, S]."""
    mask = call.visible(call.q_tokens, part.tokens)
    if call.keep is not None:
        keep = call.keep
        mask = mask & (keep if keep.shape[-1] == 1 else keep[..., slot : slot + part.tokens.count])
    dtype = call.work_dtype
    k = part.k.to(dtype).masked_fill(_unseen(call, mask), 0.0)
    q = call.q.to(dtype).masked_fill(~mask.any(-1).unsqueeze(-1), 0.0)
    s = call.grouped(q).flatten(2, 3) @ k.transpose(-1, -2) * call.scale
    s = s.unflatten(2, (call.heads.group, -1)).flatten(1, 2)
    s = call.scored(s, q, call.q_tokens, part.tokens)
    return s.masked_fill(~mask, float("-inf")), mask


def _unseen(call: Call, mask: Tensor) -> Tensor:
    """bool [B|1, K|1, S, 1]: keys that no query of this call sees; they do not matter, NaN included."""
    seen = mask.any(-2)
    if seen.shape[1] > 1:
        seen = seen.unflatten(1, (call.heads.kv_heads, -1)).any(2)
    return ~seen.unsqueeze(-1)


def _arange(t: Tensor, dim: int) -> Tensor:
    return torch.arange(t.shape[dim], device=t.device).unsqueeze(0)
