"""Muon over matrices of which ranks have parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headway.parallel import Shards


class SharedMuon(torch.optim.Muon):
    """`torch.optim.Muon`, which makes whole matrices orthogonal: one after the other is gathered, with its gradient and
    momentum, stepped by every rank alike, and cut again. Three times the numbers of a matrix travel.

    Args:
        params: the matrices; all ranks have them in the same order.
        names: of all parameters; shards: which of them are cut.
        how: as in `torch.optim.Muon`.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], names: Mapping[nn.Parameter, str], shards: Shards, **how: Any
    ) -> None:
        super().__init__(params, **how)
        self.names, self.shards = names, shards

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of all matrices."""
        groups = self.param_groups
        try:
            for group in groups:
                for p in group["params"]:
                    self.param_groups = [{**group, "params": [p]}]
                    with self._whole(p):
                        super().step()  # type: ignore[no-untyped-call]
        finally:
            self.param_groups = groups

    @contextmanager
    def _whole(self, p: nn.Parameter) -> Iterator[None]:
        name, state, own = self.names[p], self.state[p], p.data
        if p.grad is None or name not in self.shards.axes:
            yield
            return
        gradient, p.grad = p.grad, None
        p.data, p.grad = self.shards.whole(name, own), self.shards.whole(name, gradient)
        state |= {key: self.shards.whole(name, value) for key, value in state.items()}
        yield
        p.grad = None
        own.copy_(self.shards.own(name, p.data))
        p.data = own
        state |= {key: self.shards.own(name, value).clone() for key, value in state.items()}
