"""Sending tensors between ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange(ABC):
    """Messages among `ranks` processes; all ranks must request the same exchanges in the same order."""

    rank: int
    ranks: int

    @abstractmethod
    def start(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> Callable[[], None]:
        """Begins to send `sent` to one rank and to fill `received` from another; either may be None. Returns a function
        that waits for both. Tensors must be contiguous."""

    def peers(self, hop: int) -> tuple[int, int]:
        """Returns the ranks that this rank sends to and receives from in a hop."""
        return (self.rank + hop) % self.ranks, (self.rank - hop) % self.ranks

    def gather(self, local: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, which must have the same shape, in the order of ranks."""
        local = local.contiguous()
        gathered = [local if rank == self.rank else torch.empty_like(local) for rank in range(self.ranks)]
        for hop in range(1, self.ranks):
            to, source = self.peers(hop)
            self.start(local, to, gathered[source], source)()
        return gathered

    @abstractmethod
    def all_to_all(self, local: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Sends `sent[r]` rows of `local`, in order, to each rank r, and returns the rows received, `received[r]` from
        each, in the order of ranks. Any of these counts may be 0."""

    @abstractmethod
    def sum(self, local: Tensor) -> Tensor:
        """Returns the sum over ranks, bitwise equal on all of them."""


class DistributedExchange(Exchange):
    """An exchange over a process group of torch.distributed (gloo, NCCL); the default group unless one is given."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def start(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> Callable[[], None]:
        transfers = [(dist.isend, sent, to), (dist.irecv, received, source)]
        messages = [
            dist.P2POp(operation, t, group=self.group, group_peer=peer)
            for operation, t, peer in transfers
            if t is not None
        ]
        works = dist.batch_isend_irecv(messages) if messages else []

        def wait() -> None:
            for work in works:
                work.wait()
            messages.clear()  # until now they kept the sent tensors alive

        return wait

    def all_to_all(self, local: Tensor, sent: list[int], received: list[int]) -> Tensor:
        arrived = local.new_empty(sum(received), *local.shape[1:])
        dist.all_to_all_single(arrived, local.contiguous(), received, sent, group=self.group)
        return arrived

    def sum(self, local: Tensor) -> Tensor:
        # all_reduce adds up each part of the tensor on one rank
        total = local.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total
