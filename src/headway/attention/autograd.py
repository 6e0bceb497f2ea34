"""The single autograd function around a whole plan, for backends with a backward of their own.

Its backward needs only the final (out, lse) of the merged result: the gradient of each block is independent of the
others, and both parts of the partial are differentiable.
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
    """Returns the partial of `call` from a backend that can run it. It is differentiable in both parts, only once if
    the backend has a backward of its own."""
    dequantizes = not backend.capabilities.int8 and any(part.is_int8 for part in call.keys)
    if dequantizes or call.needs_grad or not backend.capabilities.stores:
        call = call.gathered()
    if dequantizes:  # after gathering: of a store, only the keys that are read are dequantized
        call = call.dequantized()
    if backend.operator is not None and torch.compiler.is_compiling():
        return backend.operator(call)
    if backend.backward is None or not call.needs_grad:
        return backend.forward(call, lse)
    tensors = [*(s.k for s in call.keys), *(s.v for s in call.keys), *call.parameters]
    out, sums = _Attention.apply(backend, call, call.q, *tensors)  # type: ignore[no-untyped-call]
    return Partial(out, sums)


def gradients(backend: Backend, call: Call, merged: Partial, d_out: Tensor, d_lse: Tensor) -> Gradients:
    """Returns the gradients that the single key set of `call` contributes to a result that was merged from several
    sets.

    A backward of the backend needs only the merged (out, lse). Without one, torch differentiates the partial (out_i,
    lse_i) of this set. With w = exp(lse_i - lse), the merge passes it the gradients w dOut and w (rowsum(dOut * (out_i
    - out)) + dlse).
    """
    if backend.backward is not None:
        return backend.backward(call, merged.out, merged.lse, d_out, d_lse)
    (keys,) = call.keys
    tensors = (call.q, keys.k, keys.v, *call.parameters)
    q, k, v, *parameters = leaves = [t.detach().requires_grad_() for t in tensors]
    with torch.enable_grad():
        leaf_call = replace(call, q=q, keys=(KeyValues(k, v, keys.tokens),))
        part = backend.forward(leaf_call.with_parameters(parameters), True)
    weight = torch.exp(part.lse.detach() - merged.lse).masked_fill(part.lse == float("-inf"), 0.0)
    d = weight.unsqueeze(-1) * d_out
    d_sum = (d * (part.out.detach() - merged.out)).sum(-1) + weight * d_lse
    grads = torch.autograd.grad((part.out, part.lse), leaves, (d, d_sum), materialize_grads=True)
    return Gradients(grads[0], [grads[1]], [grads[2]], list(grads[3:]))


def no_second_derivative(backend: str) -> BackendError:
    """Returns the error about second derivatives, which names the backend that ran and the one that supports them."""
    return BackendError(f'second derivatives of attention need backend="dense"; this call ran on {backend!r}')


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backend: Backend, call: Call, q: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the backend's forward. `tensors` are all k, then all v, then the tensors of the scores."""
        part, empty = backend.forward(call, True), q.new_empty(0)
        # The saved call holds no q, k and v: only autograd keeps them alive, and checks that they were not modified.
        keys = tuple(KeyValues(empty, empty, side.tokens) for side in call.keys)
        ctx.backend, ctx.call = backend, replace(call, q=empty, keys=keys)
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
        full_call = replace(call, q=q, keys=keys).with_parameters(tensors[2 * count :])
        result = backend.backward(full_call, out, lse, *grads)
        pairs = zip([result.q, *result.k, *result.v, *result.parameters], [q, *tensors], strict=True)
        return None, None, *(g.to(t.dtype) if t.requires_grad else None for g, t in pairs)
