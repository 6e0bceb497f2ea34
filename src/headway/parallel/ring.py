"""Attention of one rank over its own keys and those that it reads from other ranks, forward and backward.

Legend: B rows, H query heads, K kv heads, T queries, S keys, D per head of q and k, E of v.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.attention import Backend, Gradients, KeyValues
from headway.attention.autograd import gradients
from headway.attention.call import Call
from headway.attention.select import select
from headway.errors import BackendError
from headway.parallel.exchange import Exchange
from headway.parallel.plan import ContextPlan
from headway.partial import Partial


def run(call: Call, plan: ContextPlan, exchange: Exchange, backend: str) -> Partial:
    """Returns the partial of this rank's queries over the keys of all ranks; `call` has this rank's keys as its only
    set.

    out and lse are float32 (float64 for float64 inputs), whatever the dtype of q: the partials are computed and merged
    in it, and the caller rounds. Every rank must call this, and every rank must run its backward.
    """
    ring = _Ring(call, plan, exchange, backend)
    (local,) = call.keys
    tensors = (call.q, local.k, local.v, *call.parameters)
    if not call.needs_grad:
        return ring.forward(*tensors)
    out, lse = _Function.apply(ring, *tensors)  # type: ignore[no-untyped-call]
    return Partial(out, lse)


class _Ring:
    """A call without its tensors, which autograd alone holds, and the access to the other ranks' keys.

    The keys of the next hop are sent while those of the last hop are used.
    """

    def __init__(self, call: Call, plan: ContextPlan, exchange: Exchange, backend: str) -> None:
        empty = call.q.new_empty(0)
        self.tokens, self.differentiable = call.keys[0].tokens, call.needs_grad
        self.call = replace(call, q=empty, keys=())
        self.plan, self.exchange, self.backend = plan, exchange, backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Partial:
        """Returns the merged partials over this rank's own keys and those of each hop."""
        merged: Partial | None = None
        for _, keys in self._travel(k, v):
            if keys is not None:
                call = self._over(q, keys, parameters)
                part = self._select(call).forward(call, True)
                merged = part if merged is None else merged.merge(part)
        assert merged is not None, "a rank has keys of its own"
        return merged

    def backward(
        self,
        merged: Partial,
        d_out: Tensor,
        d_lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *parameters: Tensor,
    ) -> Gradients:
        """Repeats the hops; the gradients of keys and values are sent to their owners, which add them up in the order
        of hops."""
        dtype = merged.lse.dtype
        widths = k.shape[3], v.shape[3]
        dq, d_keys = (
            torch.zeros(shape, dtype=dtype, device=q.device)
            for shape in (q.shape, (*k.shape[:3], sum(widths)))
        )
        sums = [torch.zeros_like(p) for p in parameters]
        arrive: Callable[[], None] = lambda: None  # noqa: E731
        for hop, keys in self._travel(k, v):
            d_read: Tensor | None = None
            if keys is not None:
                call = self._over(q, keys, parameters)
                grads = gradients(self._select(call), call, merged, d_out, d_lse)
                d_read = torch.cat((grads.k[0], grads.v[0]), -1).to(dtype)
                dq += grads.q
                for total, grad in zip(sums, grads.parameters, strict=True):
                    total += grad
            arrive()
            arrive = self._send_home(hop, d_read, d_keys)
        arrive()
        dk, dv = d_keys.split(widths, -1)
        return Gradients(dq, [dk], [dv], sums)

    def _over(self, q: Tensor, keys: KeyValues, parameters: Sequence[Tensor]) -> Call:
        """Returns the call on one set of keys, in the dtype of partials."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        q = q.detach().to(dtype).requires_grad_(self.differentiable)
        keys = keys.map(lambda t: t.to(dtype))
        call = self.call.with_parameters(parameters) if self.call.score else self.call
        return replace(call, q=q, keys=(keys,))

    def _select(self, call: Call) -> Backend:
        with torch.set_grad_enabled(self.differentiable):
            return select(call, self.backend, True)

    # -- messages ----------------------------------------------------------------------------------------------

    def _travel(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, KeyValues | None]]:
        """Yields (hop, keys read in it or None), beginning with hop 0, the rank's own keys."""
        hop_of_keys = 0
        arrived: KeyValues | None = KeyValues(k, v, self.tokens)
        for hop in self.plan.hops:
            arrive = self._fetch(hop, k, v)
            yield hop_of_keys, arrived
            hop_of_keys, arrived = hop, arrive()
        yield hop_of_keys, arrived

    def _fetch(self, hop: int, k: Tensor, v: Tensor) -> Callable[[], KeyValues | None]:
        rank = self.exchange.rank
        reader, owner = self.exchange.peers(hop)
        slots, read = self.plan.reads[reader][rank].slots, self.plan.reads[rank][owner]
        sent = torch.cat((k[:, :, slots], v[:, :, slots]), -1) if slots.numel() else None
        widths = k.shape[3], v.shape[3]
        incoming = k.new_empty(*k.shape[:2], read.count, sum(widths)) if read.count else None
        wait = self.exchange.start(sent, reader, incoming, owner)

        def arrive() -> KeyValues | None:
            wait()
            if incoming is None:
                return None
            keys, values = incoming.split(widths, -1)
            return KeyValues(keys, values, read.tokens)

        return arrive

    def _send_home(self, hop: int, d_read: Tensor | None, total: Tensor) -> Callable[[], None]:
        """Sends the gradients of the keys and values that this rank read in a hop to their owner; returns a function
        that adds those that arrive for its own keys to `total`."""
        rank = self.exchange.rank
        reader, owner = self.exchange.peers(hop)
        slots = self.plan.reads[reader][rank].slots
        if hop == 0:
            assert d_read is not None
            total += d_read
            return lambda: None
        incoming = total.new_empty(*total.shape[:2], len(slots), total.shape[3]) if len(slots) else None
        wait = self.exchange.start(d_read, owner, incoming, reader)

        def arrive() -> None:
            wait()
            if incoming is not None:
                total[:, :, slots] += incoming

        return arrive


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: _Ring, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        part = ring.forward(*tensors)
        ctx.ring = ring
        ctx.save_for_backward(part.out, part.lse, *tensors)
        return part.out, part.lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise BackendError(
                "context parallel supports no second derivatives of attention; compute them in one process, with "
                'backend="dense"'
            )
        out, lse, *tensors = ctx.saved_tensors
        result = ctx.ring.backward(Partial(out, lse), *grads, *tensors)
        in_order = (result.q, *result.k, *result.v, *result.parameters)
        return None, *(
            g.to(t.dtype) if t.requires_grad else None for g, t in zip(in_order, tensors, strict=True)
        )
