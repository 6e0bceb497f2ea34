"""Micro batches side by side: a few threads that compute alone, instead of one that calls for help at every product.

Torch's threads meet at the end of every operation. In a small model that is thousands of meetings a step, and when
another process holds one of the cores, everybody waits for it every time. Workers meet once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import torch

from headway.choice import Choice
from headway.errors import ConfigError
from headway.models import ModelSpec, cost

GRADIENT_BYTES = 1 << 30
T = TypeVar("T")
R = TypeVar("R")


class MicrobatchPool:
    """`count` threads, each with one CPU thread of torch; one worker is the caller itself, with all of torch's.

    A context manager: while it is open with several workers, torch in the calling thread has one CPU thread too.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None
        self._before = torch.get_num_threads()

    def map(self, run: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        """`run` of every item, results in the order of the items whoever is done first."""
        return map(run, items) if self._pool is None else self._pool.map(run, items)

    def __enter__(self) -> MicrobatchPool:
        if self.count > 1:
            self._before = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(self.count, initializer=torch.set_num_threads, initargs=(1,))
            torch.set_num_threads(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
            torch.set_num_threads(self._before)


def choose_workers(
    asked: int | None, *, threads: int, micro_batches: int, spec: ModelSpec, dtype: torch.dtype
) -> Choice:
    """How many micro batches of a step run side by side; `what` is the number.

    As many as there are CPU threads, unless there are fewer micro batches, the gradients that all of them hold at
    once would take more than a GiB, or dropout draws its seeds in the order of the micro batches.
    """
    kinds = ("attention_dropout", "dropout", "activation_dropout")
    which = next((f"{kind.replace('_', ' ')} {p}" for kind in kinds if (p := getattr(spec, kind))), None)
    if which is not None:
        if asked is not None and asked > 1:
            raise ConfigError(
                f"workers={asked} with {which}: its seeds are drawn in the order "
                "of the micro batches, so they run one after the other; leave workers out, or set it to 1"
            )
        return Choice("1", "dropout draws its seeds in the order of the micro batches")
    if asked is not None:
        return Choice(str(min(asked, micro_batches)), "asked for")
    held = threads * cost.parameter_count(spec) * dtype.itemsize
    if threads > 1 and held > GRADIENT_BYTES:
        return Choice("1", f"the gradients of {threads} workers would take {held / 2**30:.1f} GiB")
    return Choice(str(min(threads, micro_batches)), "micro batches side by side, one CPU thread each")
