"""The processes of a distributed run: the work of each, and the messages among them."""

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
    """One of the processes of a run, all of which must request the same messages in the same order.

    Attributes:
        mesh: how the processes share the work. rank: this one's number; rank 0 is the main process, which prints and
            writes.
        place: its number along each axis of the mesh.
        exchange: among the processes that share the tokens of a row with this one; None without context parallelism.
        tensor: among those that share the heads and hidden units of each layer with it; None without tensor
            parallelism.
        experts: among those that share its experts with it; None without expert parallelism.

    Raises RankError, at a message, if another process died, stopped or hangs, naming it.
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
        """Whether a forward sends messages to processes with other rows, so that all must run equally many forwards."""
        return self.mesh.fsdp * self.mesh.expert > 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[tuple[int, T]]:
        """Returns this process's items of a step with their indices; each item is assigned to one of the processes (or
        groups) that share micro-batches."""
        return [(i, items[i]) for i in self.mesh.share(self.rank, len(items))]

    def gather(self, value: T) -> list[T]:
        """Returns the values of all processes, in the order of ranks."""
        if self._roll is None:
            return [value]
        values: list[T] = [value] * self.mesh.ranks
        self._together(lambda: dist.all_gather_object(values, value))
        return values

    def gather_parts(self, value: T) -> list[T]:
        """Returns one value from each group of processes that share heads (tensor parallel)."""
        return self.gather(value)[:: self.mesh.tp]

    def agree(self, value: T) -> T:
        """Returns the main process's value."""
        return self.gather(value)[0]

    def add_up(self, tensors: Iterable[Tensor], *axes: str) -> None:
        """Replaces every tensor by its sum over the processes along these axes, which have the same part of each
        weight; the result is bitwise equal in all of them."""
        if any(getattr(self.mesh, axis) > 1 for axis in axes):
            group = self.group(*axes)
            self._in_buckets(tensors, lambda flat: dist.all_reduce(flat, group=group))

    @torch.no_grad()
    def take_from_main(self, tensors: Iterable[Tensor]) -> None:
        """Replaces every tensor by the main process's."""
        self._in_buckets(tensors, lambda flat: dist.broadcast(flat, 0))

    def map(self, run: Callable[[Sequence[T]], Iterable[R]], items: Iterable[T]) -> list[R]:
        """Returns the results of `run` for all items, in order, in all processes; each item is computed by one process,
        or by a group that shares heads."""
        all_items, workers = list(items), self.mesh.ranks // self.mesh.tp
        local = all_items[self.rank // self.mesh.tp :: workers]
        if self.in_step:  # all processes must run equally many forwards: the first item is repeated
            local += all_items[:1] * (-(-len(all_items) // workers) - len(local))
        with self.named():
            results = list(run(local))
        parts = self.gather_parts(results)
        return [parts[i % workers][i // workers] for i in range(len(all_items))]

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Returns the process group of those whose places differ from this one's along these axes alone.

        Every process must request it; on the first request all groups of these axes are created, in order, and each
        process keeps its own."""
        axes = tuple(axis for axis in axes if getattr(self.mesh, axis) > 1)
        if axes not in self._groups:
            with self.named():
                groups = [(ranks, dist.new_group(ranks, self._patience)) for ranks in self.mesh.groups(*axes)]
            self._groups[axes] = next(group for ranks, group in groups if self.rank in ranks)
        return self._groups[axes]

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Runs the body in the main process alone, however long it takes; then in the others, concurrently."""
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
        """Turns a RuntimeError of a message into a RankError that names the missing process, if one is missing."""
        try:
            yield
        except RuntimeError as error:
            if self._roll is None:
                raise
            raise self._roll.missing(error) from error


ALONE = Parallel()


def count_ranks() -> int:
    """Returns the number of processes of the run that this one belongs to (`joined`)."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def joined(mesh: str | None = None, *, patience: float = 600.0) -> Iterator[Parallel]:
    """Joins the processes that torchrun (or whoever sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) started, or
    those of torch.distributed if it is initialized already; else yields this process alone.

    Args:
        mesh: how they share the work (`Mesh.of`).
        patience: seconds that they wait for each other.

    Messages use gloo, and NCCL between GPUs. Raises ConfigError for a mesh of another number of processes, RankError if
    the processes do not find each other.
    """
    existing, ranks = dist.is_initialized(), count_ranks()
    process_mesh = Mesh.of(mesh, ranks)
    if ranks == 1:
        yield ALONE
        return
    if not existing:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        fault = f"the {ranks} processes of the run did not find each other"
        with as_error(RankError, fault, RuntimeError, ValueError):
            dist.init_process_group(backend, timeout=timedelta(seconds=patience))
    store = dist.distributed_c10d.PrefixStore(
        f"headway/{next(_runs)}", dist.distributed_c10d._get_default_store()
    )
    roll = Roll(store, dist.get_rank(), ranks)
    try:
        yield Parallel(process_mesh, roll, timedelta(seconds=patience))
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
    """Yields lists of consecutive tensors of one dtype and device, of at most `BUCKET_BYTES` together, or of a single
    tensor."""
    for _, alike in itertools.groupby(tensors, lambda t: (t.dtype, t.device)):
        bucket: list[Tensor] = []
        for t in alike:
            if bucket and sum(held.nbytes for held in bucket) + t.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(t)
        yield bucket
