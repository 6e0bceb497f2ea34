"""The one autograd function around a whole plan, for backends that have a backward.

The backward needs only the final (out, lse) of the merged result: every block's gradient is independent of
the others, and both parts of the partial are differentiable.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.attention.backends.base import Backend, Gradients
from headway.attention.call import Call
from headway.attention.key_values import KeyValues
from headway.errors import BackendError
from headway.partial import Partial


def run(backend: Backend, call: Call, lse: bool) -> Partial:
    """The partial of `call` by a backend that can run it; differentiable in both parts, once where the backend has its
    own backward."""
    rounded = not backend.capabilities.int8 and any(part.is_int8 for part in call.keys)
    if rounded or not backend.capabilities.stores:
        call = call.gathered()
    if rounded:  # only the keys of a store that are attended to
        call = call.dequantized()
    if backend.operator is not None and torch.compiler.is_compiling():
        return backend.operator(call)
    if backend.backward is None or not call.needs_grad:
        return backend.forward(call, lse)
    tensors = [*(s.k for s in call.keys), *(s.v for s in call.keys), *call.parameters]
    out, sums = _Attention.apply(backend, call, call.q, *tensors)  # type: ignore[no-untyped-call]
    return Partial(out, sums)


def gradients(backend: Backend, call: Call, merged: Partial, d_out: Tensor, d_lse: Tensor) -> Gradients:
    """The gradients that the one set of keys of `call` contributes, where a result was merged from several sets.

    A backend's own backward needs the merged (out, lse) alone. For the others, with w = exp(lse_i - lse), the partial
    of this set is given the gradients w dOut and w (rowsum(dOut * (out_i - out)) + dlse) of the merge.
    """
    if backend.backward is not None:
        return backend.backward(call, merged.out, merged.lse, d_out, d_lse)
    (keys,) = call.keys
    tensors = (call.q, keys.k, keys.v, *call.parameters)
    q, k, v, *parameters = leaves = [t.detach().requires_grad_() for t in tensors]
    with torch.enable_grad():
        on = replace(call, q=q, keys=(KeyValues(k, v, keys.tokens),))
        part = backend.forward(on.with_parameters(parameters), True)
    weight = torch.exp(part.lse.detach() - merged.lse).masked_fill(part.lse == float("-inf"), 0.0)
    d = weight.unsqueeze(-1) * d_out
    d_sum = (d * (part.out.detach() - merged.out)).sum(-1) + weight * d_lse
    grads = torch.autograd.grad((part.out, part.lse), leaves, (d, d_sum), materialize_grads=True)
    return Gradients(grads[0], [grads[1]], [grads[2]], list(grads[3:]))


def no_second_derivative(backend: str) -> BackendError:
    """The error that names the backend which ran, and the one that could."""
    return BackendError(
        f'second derivatives of attention: only backend="dense" has them, this call ran on {backend!r}; '
        'pass backend="dense" to it'
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backend: Backend, call: Call, q: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """`tensors`: every k, every v, and those of the scores."""
        part, none = backend.forward(call, True), q.new_empty(0)
        # Holds no q, keys and values: autograd alone keeps those.
        keys = tuple(KeyValues(none, none, side.tokens) for side in call.keys)
        ctx.backend, ctx.call = backend, replace(call, q=none, keys=keys)
        ctx.save_for_backward(q, part.out, part.lse, *tensors)
        return part.out, part.lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        backend: Backend = ctx.backend
        call: Call = ctx.call
        if torch.is_grad_enabled():
            raise no_second_derivative(backend.name)
        assert backend.backward is not None
        q, out, lse, *tensors = ctx.saved_tensors
        count = len(call.keys)
        sets = zip(tensors[:count], tensors[count : 2 * count], call.keys, strict=True)
        keys = tuple(KeyValues(k, v, side.tokens) for k, v, side in sets)
        whole = replace(call, q=q, keys=keys).with_parameters(tensors[2 * count :])
        result = backend.backward(whole, out, lse, *grads)
        pairs = zip([result.q, *result.k, *result.v, *result.parameters], [q, *tensors], strict=True)
        return None, None, *(g.to(t.dtype) if t.requires_grad else None for g, t in pairs)
