"""Expert parallelism: each rank has some of the experts of a layer, whole, and rows are sent to the ranks of their
experts.

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
    """The ranks that share the experts of each layer: rank r has the E / R experts from number r E / R on.

    Every row is sent to the ranks of the experts that were chosen for it, and their outputs are sent back (Lepikhin et
    al. 2020, "GShard", section 3.2). Everything else each rank computes for its own rows.

    Attributes:
        exchange: the ranks.
        same_rows: whether all ranks have the same rows, as in generation: each then processes its part of the rows, and
            all get the outputs of all rows; without gradients.
    """

    exchange: Exchange
    same_rows: bool = False

    def share(self, count: int) -> range:
        """Returns the numbers of this rank's experts, out of `count`. Raises ConfigError if the number of ranks does
        not divide it."""
        return share(count, "experts", self.exchange.ranks, self.exchange.rank, "expert")

    def apply(self, rows: Tensor, counts: Tensor, run: Callable[[Tensor, list[int]], Tensor]) -> Tensor:
        """Returns the experts' outputs for rows [N, M] that are sorted by expert, `counts` [E] rows for each.

        `run(rows, counts)` applies this rank's own experts to the rows of all ranks. Ranks without rows must call this,
        too."""
        ranks = self.exchange.ranks
        # routed[r, e]: rows that rank r sends to this rank's expert e
        routed = torch.stack(
            [
                counts_there.view(ranks, -1)[self.exchange.rank]
                for counts_there in self.exchange.gather(counts)
            ]
        )
        sent, received = counts.view(ranks, -1).sum(1).tolist(), routed.sum(1).tolist()
        arrived: Tensor = _Exchanged.apply(rows, self.exchange, sent, received)  # type: ignore[no-untyped-call]
        experts = torch.arange(routed.shape[1]).repeat(ranks).repeat_interleave(routed.flatten().cpu())
        order = experts.argsort(stable=True).to(rows.device)  # from the order of ranks to that of experts
        outputs = run(arrived.index_select(0, order), routed.sum(0).tolist()).index_select(0, order.argsort())
        returned: Tensor = _Exchanged.apply(outputs, self.exchange, received, sent)  # type: ignore[no-untyped-call]
        return returned

    def of_parts(self, rows: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns run(rows) [N, M] for rows that are the same on all ranks, each of which runs a part. Raises
        ConfigError if gradients are recorded."""
        if torch.is_grad_enabled():
            raise ConfigError(
                "expert parallel: no gradients are computed if all ranks have the same rows; use torch.no_grad()"
            )
        outputs, ranks, rank = torch.zeros_like(rows), self.exchange.ranks, self.exchange.rank
        outputs.tensor_split(ranks)[rank].copy_(run(rows.tensor_split(ranks)[rank]))
        return self.exchange.sum(outputs)

    def __deepcopy__(self, memo: object) -> "ExpertParallel":
        return self  # replicas of a module talk to the same ranks


class _Exchanged(torch.autograd.Function):
    """`Exchange.all_to_all`, whose gradient is exchanged in the opposite direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, sent: list[int], received: list[int]) -> Tensor:
        ctx.how = exchange, received, sent
        return exchange.all_to_all(x, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchanged.apply(grads[0], *ctx.how), None, None, None  # type: ignore[no-untyped-call]
