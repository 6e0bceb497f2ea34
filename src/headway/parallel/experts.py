"""Layers whose experts are shared by ranks: each has some of them whole, and rows go to where their experts are.

Legend: R ranks, E experts, N rows sorted by their experts, M width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.parallel.exchange import Exchange
from headway.parallel.tensor import share


@dataclass(frozen=True, eq=False)
class ExpertParallel:
    """The ranks that share the experts of each layer: rank r has the E / R from number r E / R on.

    Every row is sent to the ranks of the experts that were chosen for it, and their outputs are sent back
    (Lepikhin et al. 2020, "GShard", section 3.2). All else each rank computes for its own rows.

    Attributes:
        exchange: the ranks.
        same_rows: whether all ranks have the same rows, as in generation: each then sends out its part of them, and all
            have the outputs of all; without gradients.
    """

    exchange: Exchange
    same_rows: bool = False

    def share(self, count: int) -> range:
        """The numbers of this rank's experts, out of `count`. Raises ConfigError where ranks do not divide them."""
        return share(count, "experts", self.exchange.ranks, self.exchange.rank, "expert")

    def apply(self, rows: Tensor, counts: Tensor, run: Callable[[Tensor, list[int]], Tensor]) -> Tensor:
        """The experts' outputs for rows [N, M] that lie sorted by their experts, `counts` [E] of each: `run(rows,
        counts)` is of this rank's own experts, for the rows of all ranks. Ranks without rows take part alike."""
        ranks = self.exchange.ranks
        routed = torch.stack(
            [theirs.view(ranks, -1)[self.exchange.rank] for theirs in self.exchange.gather(counts)]
        )
        sent, received = counts.view(ranks, -1).sum(1).tolist(), routed.sum(1).tolist()
        arrived: Tensor = _Exchanged.apply(rows, self.exchange, sent, received)  # type: ignore[no-untyped-call]
        experts = torch.arange(routed.shape[1]).repeat(ranks).repeat_interleave(routed.flatten().cpu())
        order = experts.argsort(stable=True).to(rows.device)  # from rank by rank to expert by expert
        outputs = run(arrived.index_select(0, order), routed.sum(0).tolist()).index_select(0, order.argsort())
        returned: Tensor = _Exchanged.apply(outputs, self.exchange, received, sent)  # type: ignore[no-untyped-call]
        return returned

    def of_parts(self, rows: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """run(rows) [N, M] of the same rows on all ranks, each of which runs its part. Raises ConfigError where
        gradients are recorded."""
        if torch.is_grad_enabled():
            raise ConfigError(
                "expert parallel: ranks with the same rows compute no gradients; use torch.no_grad()"
            )
        every, ranks, rank = torch.zeros_like(rows), self.exchange.ranks, self.exchange.rank
        every.tensor_split(ranks)[rank].copy_(run(rows.tensor_split(ranks)[rank]))
        return self.exchange.sum(every)

    def __deepcopy__(self, memo: object) -> "ExpertParallel":
        return self  # replicas of a module talk to the same ranks


class _Exchanged(torch.autograd.Function):
    """`Exchange.all_to_all`, whose gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, sent: list[int], received: list[int]) -> Tensor:
        ctx.how = exchange, received, sent
        return exchange.all_to_all(x, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchanged.apply(grads[0], *ctx.how), None, None, None  # type: ignore[no-untyped-call]
