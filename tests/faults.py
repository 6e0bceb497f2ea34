"""Simulated disk faults: any call of a save can fail, kill its process, or write only part of its bytes."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.storage import disk

Watcher = Callable[[str, Path, memoryview | None], int | None]

FUNCTIONS = {
    "mkdir": "make_folder",
    "fsync": "sync",
    "rename": "replace",
    "exchange": "exchange",
    "link": "link",
    "remove": "remove",
}
METHODS = {"open": "__init__", "write": "write", "fsync": "sync", "close": "close"}
"""Operation -> what performs it: a function of `disk`, or a method of `disk.NewFile`."""


@contextmanager
def watch(callback: Watcher) -> Iterator[None]:
    """Calls `callback(operation, path, data)` before every call that a save makes; `path` is what it changes.

    The callback may raise (the call then fails with that error) or, for a "write", return a number n of bytes: the
    first n bytes are written and the call then fails with "no space left on device", as a full disk does."""
    with pytest.MonkeyPatch.context() as patch:
        for operation, name in FUNCTIONS.items():
            patch.setattr(disk, name, _watched(operation, getattr(disk, name), callback))
        for operation, name in METHODS.items():
            patch.setattr(disk.NewFile, name, _watched(operation, getattr(disk.NewFile, name), callback))
        yield


def calls_of(action: Callable[[], object]) -> list[str]:
    """Returns the names of the calls that an action makes."""
    operations: list[str] = []
    with watch(lambda operation, path, data: operations.append(operation)):
        action()
    return operations


def failing(n: int) -> Watcher:
    """Returns a watcher by which call number n fails."""
    count = iter(range(10**6))

    def watcher(operation: str, path: Path, data: memoryview | None) -> None:
        if next(count) == n:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    return watcher


def _watched(operation: str, call: Callable[..., Any], callback: Watcher) -> Callable[..., Any]:
    def watched(first: Any, *arguments: Any) -> Any:
        data = memoryview(arguments[0]).cast("B") if operation == "write" else None
        path = next((x for x in reversed((first, *arguments)) if isinstance(x, Path)), None) or first.path
        try:
            cut = callback(operation, path, data)
        except OSError:
            if operation == "close":  # the file is closed although an error is reported
                call(first)
            raise
        if cut is not None and data is not None:
            call(first, data[:cut])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return call(first, *arguments)

    return watched
