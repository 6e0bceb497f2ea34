"""Simulates ranks by threads of one process, without a process group."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from headway.parallel.exchange import Exchange

Result = TypeVar("Result")
Mail = defaultdict[tuple[int, int], SimpleQueue[Tensor | None]]


def simulate(ranks: int, run: Callable[[Exchange], Result]) -> list[Result]:
    """Runs `run(exchange)` on every rank, each in its own thread; returns the results by rank.

    If one rank raises, the others end when they wait for it, and its error is raised. Take gradients by
    `torch.autograd.grad`: with `backward`, all ranks would add to the `grad` of parameters that they share.
    """
    mail: Mail = defaultdict(SimpleQueue)
    pairs = [(source, to) for source in range(ranks) for to in range(ranks)]
    for pair in pairs:
        mail[pair] = SimpleQueue()

    def one(rank: int) -> Result:
        try:
            return run(_Threads(rank, ranks, mail))
        except BaseException:
            for pair in pairs:
                mail[pair].put(None)
            raise

    with ThreadPoolExecutor(ranks) as pool:
        errors, results = [], []
        for future in [pool.submit(one, rank) for rank in range(ranks)]:
            error = future.exception()
            if error is None:
                results.append(future.result())
            else:
                errors.append(error)
    if errors:
        raise next((error for error in errors if not isinstance(error, _PeerFailed)), errors[0])
    return results


class _PeerFailed(Exception):
    pass


class Messages(Exchange):
    """An exchange whose operations on all ranks are made of messages between two."""

    def all_to_all(self, local: Tensor, sent: list[int], received: list[int]) -> Tensor:
        parts = [*local.contiguous().split(sent)]
        arrived = [local.new_empty(count, *local.shape[1:]) for count in received]
        arrived[self.rank] = parts[self.rank]
        for hop in range(1, self.ranks):
            to, source = self.peers(hop)
            outgoing, incoming = (
                parts[to] if sent[to] else None,
                arrived[source] if received[source] else None,
            )
            self.start(outgoing, to, incoming, source)()
        return torch.cat(arrived)

    def sum(self, local: Tensor) -> Tensor:
        """Adds the parts in the order of ranks."""
        first_part, *remaining = self.gather(local)
        total = first_part.clone()
        for part in remaining:
            total += part
        return total


class _Threads(Messages):
    def __init__(self, rank: int, ranks: int, mail: Mail) -> None:
        self.rank, self.ranks, self.mail = rank, ranks, mail

    def start(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> Callable[[], None]:
        if sent is not None:
            self.mail[self.rank, to].put(sent.clone())  # the sender may overwrite its tensor after waiting

        def wait() -> None:
            if received is None:
                return
            arrived = self.mail[source, self.rank].get()
            if arrived is None:
                raise _PeerFailed
            assert arrived.shape == received.shape, "ranks do not agree on what travels"
            received.copy_(arrived)

        return wait


class Counted(Messages):
    """Wraps an exchange. `sent`: the bytes sent directly, by dtype; `summed`: the size of each tensor summed."""

    def __init__(self, other: Exchange) -> None:
        self.other, self.rank, self.ranks = other, other.rank, other.ranks
        self.sent: Counter[torch.dtype] = Counter()
        self.summed: list[int] = []

    def start(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> Callable[[], None]:
        if sent is not None:
            self.sent[sent.dtype] += sent.nbytes
        return self.other.start(sent, to, received, source)

    def sum(self, local: Tensor) -> Tensor:
        self.summed.append(local.numel())
        return self.other.sum(local)
