"""The one autograd function around a whole plan.

The backward needs only the final (out, lse) of the merged result: every block's gradient is independent of
the others, and both parts of the partial are differentiable.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from headway.attention.call import Call
from headway.attention.key_values import KeyValues
from headway.attention.twice import no_second
from headway.partial import Partial


@dataclass(frozen=True, eq=False)
class _Plain:
    """The call without its tensors, so that autograd alone holds them."""

    name: str
    backend: ModuleType
    call: Call

    def call_with(self, q: Tensor, tensors: tuple[Tensor, ...]) -> Call:
        sets, count = self.call.keys, len(self.call.keys)
        ks, vs = tensors[:count], tensors[count : 2 * count]
        keys = tuple(KeyValues(k, v, part.tokens) for k, v, part in zip(ks, vs, sets, strict=True))
        call = replace(self.call, q=q, keys=keys)
        return call.with_parameters(tensors[2 * count :]) if call.score else call


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plain: _Plain, q: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        part = plain.backend.run_forward(plain.call_with(q, tensors))
        ctx.plain = plain
        ctx.save_for_backward(q, part.out, part.lse, *tensors)
        return part.out, part.lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise no_second(ctx.plain.name)
        d_out, d_lse = grads
        q, out, lse, *tensors = ctx.saved_tensors
        call = ctx.plain.call_with(q, tuple(tensors))
        dq, dk, dv, extra = ctx.plain.backend.run_backward(call, out, lse, d_out, d_lse)
        given = [q, *tensors]
        made = [dq, *dk, *dv, *extra]
        return None, *(g.to(t.dtype) if t.requires_grad else None for g, t in zip(made, given, strict=True))


def run(name: str, backend: ModuleType, call: Call) -> Partial:
    """The partial of `call` by a backend that has `run_forward` and `run_backward`; differentiable once."""
    if not call.needs_grad:
        with torch.no_grad():
            part: Partial = backend.run_forward(call)
            return part
    tensors = [*(s.k for s in call.keys), *(s.v for s in call.keys), *call.parameters]
    out, lse = _Blocked.apply(_Plain(name, backend, call), call.q, *tensors)  # type: ignore[no-untyped-call]
    return Partial(out, lse)
