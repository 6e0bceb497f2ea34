"""Sending tensors from rank to rank."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange(ABC):
    """Messages among `ranks`; all ranks ask for the same exchanges in the same order."""

    rank: int
    ranks: int

    @abstractmethod
    def start(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> Callable[[], None]:
        """Begins to send `sent` to a rank and to fill `received` from another, each where it is not None. Returns
        a function that waits for both. Tensors are contiguous."""

    def peers(self, hop: int) -> tuple[int, int]:
        """To whom this rank sends in a hop, and from whom it receives."""
        return (self.rank + hop) % self.ranks, (self.rank - hop) % self.ranks

    def gather(self, local: Tensor) -> list[Tensor]:
        """The tensors of all ranks, of one shape, in the order of ranks."""
        local = local.contiguous()
        gathered = [local if rank == self.rank else torch.empty_like(local) for rank in range(self.ranks)]
        for hop in range(1, self.ranks):
            to, source = self.peers(hop)
            self.start(local, to, gathered[source], source)()
        return gathered

    def all_to_all(self, local: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """The rows that ranks send to this one, `received` of each, in the order of ranks. Of `local` it sends
        `sent` rows to each, in that order; any of these counts may be 0."""
        parts = [*local.contiguous().split(sent)]
        arrived = [local.new_empty(count, *local.shape[1:]) for count in received]
        arrived[self.rank] = parts[self.rank]
        for hop in range(1, self.ranks):
            to, source = self.peers(hop)
            outgoing, room = parts[to] if sent[to] else None, arrived[source] if received[source] else None
            self.start(outgoing, to, room, source)()
        return torch.cat(arrived)

    def sum(self, local: Tensor) -> Tensor:
        """The sum over ranks, in their order: the same bits on all of them."""
        first, *others = self.gather(local)
        total = first.clone()
        for other in others:
            total += other
        return total


class DistributedExchange(Exchange):
    """Over a process group of torch.distributed (gloo, NCCL); the default group unless one is given."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def start(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> Callable[[], None]:
        transfers = [(dist.isend, sent, to), (dist.irecv, received, source)]
        messages = [
            dist.P2POp(how, t, group=self.group, group_peer=peer)
            for how, t, peer in transfers
            if t is not None
        ]
        works = dist.batch_isend_irecv(messages) if messages else []

        def wait() -> None:
            for work in works:
                work.wait()
            messages.clear()  # until here they keep the sent tensors alive

        return wait

    def all_to_all(self, local: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """The same by one collective operation."""
        arrived = local.new_empty(sum(received), *local.shape[1:])
        dist.all_to_all_single(arrived, local.contiguous(), received, sent, group=self.group)
        return arrived

    def sum(self, local: Tensor) -> Tensor:
        """The same by a ring, which adds each part of the tensor up on one rank."""
        total = local.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total
