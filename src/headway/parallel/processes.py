"""The processes of a run: the work of each, and the messages among them."""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from headway.errors import RankError, as_error
from headway.parallel.exchange import DistributedExchange
from headway.parallel.experts import ExpertParallel
from headway.parallel.mesh import Mesh
from headway.parallel.roll import FOLLOWED, Roll
from headway.parallel.tensor import TensorParallel

BUCKET_BYTES = 64 << 20
T = TypeVar("T")
R = TypeVar("R")
_runs = itertools.count()


class Parallel:
    """One of the processes of a run, which all ask for the same messages in the same order.

    Attributes:
        mesh: how they share the work. rank: this one's number; 0 is the main one, which prints and writes.
        place: its number along each axis of the mesh.
        exchange: among the processes that share the tokens of a row with this one; None where none does.
        tensor: among those that share the heads and hidden units of each layer with it; None where none does.
        experts: among those that share its experts with it; None where none does.

    Raises RankError, at a message, when another process died, stopped or hangs: which one.
    """

    def __init__(
        self,
        mesh: Mesh = Mesh(),  # noqa: B008
        roll: Roll | None = None,
        patience: timedelta | None = None,
    ) -> None:
        self.mesh, self._roll, self._patience = mesh, roll, patience
        self.rank = 0 if roll is None else roll.rank
        self.place = mesh.place(self.rank)
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self.exchange = DistributedExchange(self.group("cp")) if mesh.cp > 1 else None
        self.tensor = TensorParallel(DistributedExchange(self.group("tp"))) if mesh.tp > 1 else None
        self.experts = ExpertParallel(DistributedExchange(self.group("expert"))) if mesh.expert > 1 else None
        self._turns = itertools.count()

    @property
    def in_step(self) -> bool:
        """Whether a forward sends messages to processes with other rows, so that all make as many."""
        return self.mesh.fsdp * self.mesh.expert > 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[tuple[int, T]]:
        """This process's items of a step, with their numbers, each once over the processes that share them."""
        return [(i, items[i]) for i in self.mesh.share(self.rank, len(items))]

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in the order of ranks."""
        if self._roll is None:
            return [value]
        values: list[T] = [value] * self.mesh.ranks
        self._together(lambda: dist.all_gather_object(values, value))
        return values

    def gather_parts(self, value: T) -> list[T]:
        """The values of the processes that have tokens of their own: one from each group that shares heads."""
        return self.gather(value)[:: self.mesh.tp]

    def agree(self, value: T) -> T:
        """The main process's value."""
        return self.gather(value)[0]

    def add_up(self, tensors: Iterable[Tensor], *axes: str) -> None:
        """Every tensor becomes its sum over the processes along these axes, which have the same part of each weight,
        with the same bits in all of them."""
        if any(getattr(self.mesh, axis) > 1 for axis in axes):
            group = self.group(*axes)
            self._in_buckets(tensors, lambda flat: dist.all_reduce(flat, group=group))

    @torch.no_grad()
    def take_from_main(self, tensors: Iterable[Tensor]) -> None:
        """Every tensor becomes the main process's."""
        self._in_buckets(tensors, lambda flat: dist.broadcast(flat, 0))

    def map(self, run: Callable[[Sequence[T]], Iterable[R]], items: Iterable[T]) -> list[R]:
        """`run` of all items, each computed by one process, or by those that share heads; the results, in order, are in
        all of them."""
        every, number = list(items), self.mesh.ranks // self.mesh.tp
        local = every[self.rank // self.mesh.tp :: number]
        if self.in_step:
            local += every[:1] * (-(-len(every) // number) - len(local))
        with self.named():
            results = list(run(local))
        parts = self.gather_parts(results)
        return [parts[i % number][i // number] for i in range(len(every))]

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The processes that differ from this one in their places along these axes alone. Every process asks for it;
        the first time all groups are made, in their order, and each keeps its own."""
        axes = tuple(axis for axis in axes if getattr(self.mesh, axis) > 1)
        if axes not in self._groups:
            with self.named():
                groups = [(ranks, dist.new_group(ranks, self._patience)) for ranks in self.mesh.groups(*axes)]
            self._groups[axes] = next(group for ranks, group in groups if self.rank in ranks)
        return self._groups[axes]

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main process goes through the body alone, however long it takes; then the others, side by side."""
        if self._roll is None:
            yield
            return
        key = f"turn/{next(self._turns)}"
        if not self.is_main:
            self._roll.wait(key)
        yield
        if self.is_main:
            self._roll.store.set(key, "")

    def _in_buckets(self, tensors: Iterable[Tensor], act: Callable[[Tensor], object]) -> None:
        for bucket in () if self._roll is None else _buckets(tensors):
            flat = torch.cat([t.flatten() for t in bucket])
            self._together(partial(act, flat))
            for t, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                t.copy_(part.view_as(t))

    def _together(self, act: Callable[[], object]) -> None:
        assert self._roll is not None
        with self.named():
            self._roll.come()
            act()

    @contextmanager
    def named(self) -> Iterator[None]:
        """While open, a message that fails is a RankError, which names the process that is missing."""
        try:
            yield
        except RuntimeError as error:
            if self._roll is None:
                raise
            raise self._roll.missing(error) from error


ALONE = Parallel()


def count_ranks() -> int:
    """The number of processes of the run that this one belongs to (`joined`)."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def joined(mesh: str | None = None, *, patience: float = 600.0) -> Iterator[Parallel]:
    """The processes that torchrun (or whoever sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) started, or those of
    torch.distributed where it is initialized already; else this process alone.

    Args:
        mesh: how they share the work (`Mesh.of`).
        patience: seconds that they wait for each other.

    Messages go by gloo, and by NCCL between GPUs. Raises ConfigError for a mesh of another number of processes,
    RankError where they do not find each other.
    """
    existing, ranks = dist.is_initialized(), count_ranks()
    shape = Mesh.of(mesh, ranks)
    if ranks == 1:
        yield ALONE
        return
    if not existing:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        alone = f"the {ranks} processes of the run did not find each other"
        with as_error(RankError, alone, RuntimeError, ValueError):
            dist.init_process_group(backend, timeout=timedelta(seconds=patience))
    store = dist.distributed_c10d.PrefixStore(
        f"headway/{next(_runs)}", dist.distributed_c10d._get_default_store()
    )
    roll = Roll(store, dist.get_rank(), ranks)
    try:
        yield Parallel(shape, roll, timedelta(seconds=patience))
    except BaseException as error:
        roll.leave(f"{FOLLOWED if isinstance(error, RankError) else ''}{type(error).__name__}: {error}")
        raise
    else:
        roll.leave(None)
    finally:
        if not existing:
            dist.destroy_process_group()
            roll.linger()


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype and device, up to `BUCKET_BYTES` together, or one."""
    for _, alike in itertools.groupby(tensors, lambda t: (t.dtype, t.device)):
        bucket: list[Tensor] = []
        for t in alike:
            if bucket and sum(held.nbytes for held in bucket) + t.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(t)
        yield bucket
