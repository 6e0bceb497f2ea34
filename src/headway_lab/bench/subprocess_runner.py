"""Measuring in another process, with a memory of its own."""

import gc
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from headway import hardware
from headway.errors import BackendError
from headway_lab.bench.inputs import UnsupportedCase

P = ParamSpec("P")
T = TypeVar("T")


LOOK = 0.005
"""Seconds between two readings of a process's memory."""


class LimitReached(Exception):
    """A process was killed at a limit, which is the message."""


class SubprocessRunner(AbstractContextManager["SubprocessRunner"]):
    """A fresh Python process that calls functions one after the other."""

    def __init__(self) -> None:
        # Output of libraries on its stdout is redirected to stderr.
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), os.dup2, (2, 1))
        interrupt = signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # inherited by the child: Ctrl-C reaches only this process, which then ends the child
        try:
            pid = self._pool.submit(os.getpid).result()
        finally:
            signal.signal(signal.SIGINT, interrupt)
        (self._process,) = (child for child in multiprocessing.active_children() if child.pid == pid)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns the result of a module-level function in that process, at this process's thread count.

        Raises BackendError with the error of the other process, or if it has died."""
        return self.call_within(math.inf, math.inf, function, *args, **kwargs)

    def call_within(
        self, most: float, seconds: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Does the same as `call`, but kills the process if it takes more than `most` bytes beyond its present memory,
        or more than `seconds`.

        Raises LimitReached in that case."""
        interval = None if most == seconds == math.inf else LOOK
        try:
            began, bytes_before = time.monotonic(), self._resident() if interval else 0
            job = self._pool.submit(_at_threads, torch.get_num_threads(), partial(function, *args, **kwargs))
            while wait([job], interval).not_done:
                if self._resident() - bytes_before > most:
                    raise self._stopped(f"{int(most) >> 20:,} MiB")
                if time.monotonic() - began > seconds:
                    raise self._stopped(f"{seconds:g} s")
            return job.result()
        except LimitReached:
            raise
        except BrokenProcessPool:
            raise BackendError("the measuring process was killed, or crashed") from None
        except Exception as error:
            raise BackendError(str(error)) from error

    def _stopped(self, at: str) -> LimitReached:
        self._process.kill()
        return LimitReached(at)

    def _resident(self) -> int:
        """Returns the bytes of memory that the process holds now."""
        try:
            pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        except OSError as error:
            raise UnsupportedCase(f"the memory of another process cannot be read here: {error}") from error
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def __exit__(self, *_: object) -> None:
        """Kills the process, whatever it is doing."""
        self._process.kill()
        self._pool.shutdown()


def _at_threads(threads: int, call: Callable[[], T]) -> T:
    torch.set_num_threads(threads)
    return call()


def peak_of(make: Callable[P, Callable[[], object]], *args: P.args, **kwargs: P.kwargs) -> int:
    """Returns the peak bytes during the second call of the result of `make`, beyond this process's memory before:
    everything that was made, including what stays in memory between calls.

    Raises UnsupportedCase if the peak cannot be reset, which only Linux supports."""
    torch.ones(256, 256) @ torch.ones(256, 256)  # loads libraries and starts threads
    bytes_before = forget_peak()
    call = make(*args, **kwargs)
    call()
    gc.collect()
    forget_peak()
    call()
    return hardware.peak_rss() - bytes_before


def forget_peak() -> int:
    """Resets the peak memory to the current resident memory, and returns its bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise UnsupportedCase(f"the peak memory of a process cannot be reset here: {error}") from error
    return hardware.peak_rss()
