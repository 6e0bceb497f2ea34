"""How tensors get from one rank to another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor


class Exchange(ABC):
    """Point-to-point messages among `ranks`; all ranks ask for the same exchanges in the same order."""

    rank: int
    ranks: int

    @abstractmethod
    def start(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> Callable[[], None]:
        """Begins to send `sent` to a rank and to fill `received` from another, each where it is not None. What is
        returned waits for both. Tensors are contiguous."""


class DistributedExchange(Exchange):
    """Over a process group of torch.distributed (gloo, NCCL); the default group unless one is given."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def start(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> Callable[[], None]:
        asked = [(dist.isend, sent, to), (dist.irecv, received, source)]
        messages = [
            dist.P2POp(how, t, group=self.group, group_peer=peer) for how, t, peer in asked if t is not None
        ]
        works = dist.batch_isend_irecv(messages) if messages else []

        def wait() -> None:
            for work in works:
                work.wait()
            messages.clear()  # until here they keep what is sent alive

        return wait
