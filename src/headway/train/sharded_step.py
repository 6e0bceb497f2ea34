"""A step of torch's optimizers on the parts of sharded parameters, with the bits of a step on whole ones.

The last few numbers of a tensor are computed by other instructions than the rest, which is in whole vectors, and may
be rounded otherwise. So a part that is no multiple of `LANES` numbers, or is of a parameter that is none, is stepped at
its place in a tensor as large as the whole; these are biases and the like.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

LANES = 16
"""Numbers of the longest vector, and of a cache line, in float32."""


class _Part:
    """One sharded parameter and its stand-in, a plain tensor in the memory of the part, or as large as the whole."""

    def __init__(self, p: DTensor) -> None:
        self.p, local = p, p.to_local()
        shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
        self.at = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
        self.in_place = p.numel() % LANES == local.numel() % LANES == 0
        self.stand_in = nn.Parameter(self.plain(p))
        if p.grad is not None:
            assert isinstance(p.grad, DTensor)
            self.stand_in.grad = self.plain(p.grad)

    def plain(self, value: Tensor) -> Tensor:
        """What the stand-in has of a tensor like the parameter; other tensors as they are."""
        if not isinstance(value, DTensor):
            return value
        local = value.to_local().detach()
        if self.in_place:
            return local
        placed = local.new_zeros(self.p.shape)
        placed[self.at] = local
        return placed

    def sharded(self, value: Tensor) -> Tensor:
        """The inverse of `plain`."""
        if value.shape != self.stand_in.shape:
            return value
        local = value if self.in_place else value[self.at].clone()
        p = self.p
        return DTensor.from_local(
            local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )

    @torch.no_grad()
    def take_back(self) -> None:
        """The parameter takes the values of its stand-in."""
        if not self.in_place:
            self.p.to_local().copy_(self.stand_in[self.at])


@contextmanager
def plain_parts(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While open, the sharded parameters of an optimizer, their gradients and states are plain tensors."""
    parts: list[tuple[list[Any], int, _Part]] = []
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            if not isinstance(p, DTensor):
                continue
            part = _Part(p)
            group["params"][i] = part.stand_in
            if p in optimizer.state:
                state = optimizer.state.pop(p)
                optimizer.state[part.stand_in] = {name: part.plain(value) for name, value in state.items()}
            parts.append((group["params"], i, part))
    yield
    for params, i, part in parts:
        params[i] = part.p
        part.take_back()
        if part.stand_in in optimizer.state:
            state = optimizer.state.pop(part.stand_in)
            optimizer.state[part.p] = {name: part.sharded(value) for name, value in state.items()}
