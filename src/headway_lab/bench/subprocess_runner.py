"""Measuring in another process: with another environment, or with a memory of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

import torch

from headway.errors import BackendError, HeadwayError
from headway_lab.bench.inputs import UnsupportedCase

P = ParamSpec("P")
T = TypeVar("T")


class SubprocessRunner:
    """A fresh Python process with these variables in its environment, which calls functions one after the other."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
        with _inherited(environment):
            self._process.start()
        theirs.close()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a module's function in that process, at this process's thread count.

        Raises BackendError with the error of the other process, or its exit code."""
        try:
            self._pipe.send((torch.get_num_threads(), function, args, kwargs))
            value, error = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            raise BackendError(f"the measuring process ended with code {self._process.exitcode}") from None
        if error is not None:
            raise BackendError(error)
        result: T = value
        return result

    def close(self) -> None:
        """End it, whatever it is doing."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def __enter__(self) -> SubprocessRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _inherited(environment: Mapping[str, str]) -> Iterator[None]:
    """What a process that starts inside the block inherits: these variables, and that Ctrl-C is ignored (the parent
    ends it)."""
    before, interrupt = dict(os.environ), signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        signal.signal(signal.SIGINT, interrupt)


def _serve(pipe: Connection[Any, Any]) -> None:
    """Answer calls until the pipe closes; what libraries print is redirected to stderr."""
    os.dup2(2, 1)
    while True:
        try:
            threads, function, args, kwargs = pipe.recv()
        except EOFError:
            return
        torch.set_num_threads(threads)
        try:
            pipe.send((function(*args, **kwargs), None))
        except (HeadwayError, UnsupportedCase) as error:
            pipe.send((None, str(error)))
