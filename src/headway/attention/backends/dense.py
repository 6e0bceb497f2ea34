"""Backend `dense`: the specification. Builds the full score matrix, on any device and dtype, with derivatives of any
order."""

import torch
from torch import Tensor

from headway.attention.backends.base import Backend, Capabilities
from headway.attention.call import Call
from headway.partial import Partial, merge_all


def forward(call: Call, lse: bool = True) -> Partial:
    """Returns the partial over all key sets; scores and sums are in float32 (float64 for float64 inputs)."""
    return merge_all([_one(call, number) for number in range(len(call.keys))])


def _one(call: Call, number: int) -> Partial:
    part, slot, dtype = call.keys[number], call.slots[number], call.work_dtype
    scores, unseen = _scores(call, number)
    top = (
        scores.detach().amax(-1, keepdim=True)
        if part.tokens.count
        else scores.new_full((*scores.shape[:3], 1), 0)
    )
    top = top.masked_fill(top == float("-inf"), 0.0)
    p = torch.exp(scores - top)
    total = p.sum(-1, keepdim=True)
    nonempty = total > 0
    safe = torch.where(nonempty, total, 1.0)
    lse = torch.where(nonempty, torch.log(safe) + top, float("-inf")).squeeze(-1)
    p = p / safe
    if call.dropout:
        p = p * call.dropped(_arange(call.q, 2), _arange(part.k, 2) + slot, dtype)
    out = call.grouped(p).flatten(2, 3) @ part.v.to(dtype).masked_fill(unseen, 0.0)
    out = out.unflatten(2, (call.heads.group, -1)).flatten(1, 2)
    return Partial(out.to(call.q.dtype), lse)


def weights(call: Call, sink_logit: Tensor | None = None) -> Tensor:
    """Returns the attention weights [B, H, T, S] of one key set, before dropout; a row that sees nothing is all 0.
    The sink logits [H] are one more column of the softmax, which is left out of the result."""
    scores, _ = _scores(call, 0)
    if sink_logit is not None:
        column = sink_logit.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
    return torch.softmax(scores, -1).nan_to_num(0.0) if call.keys[0].tokens.count else scores


def _scores(call: Call, number: int) -> tuple[Tensor, Tensor]:
    """Returns the scores [B, H, T, S], -inf where masked, and which keys no query sees, [B|1, K|1, S, 1]."""
    part, dtype = call.keys[number], call.work_dtype
    mask, unseen = call.seen(number)
    k = part.k.to(dtype).masked_fill(unseen, 0.0)
    q = call.q.to(dtype).masked_fill(~mask.any(-1).unsqueeze(-1), 0.0)
    s = call.grouped(q).flatten(2, 3) @ k.transpose(-1, -2) * call.scale
    s = s.unflatten(2, (call.heads.group, -1)).flatten(1, 2)
    s = call.scored(s, q, call.q_tokens, part.tokens)
    return s.masked_fill(~mask, float("-inf")), unseen


def _arange(t: Tensor, dim: int) -> Tensor:
    return torch.arange(t.shape[dim], device=t.device).unsqueeze(0)


DENSE = Backend(
    name="dense",
    about="the specification: any device and dtype; builds all scores",
    forward=forward,
    capabilities=Capabilities(slot_scores=True, keep=True, stores_scores=True),
)
