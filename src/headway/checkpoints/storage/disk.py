"""Every operating-system call that a save makes, one function each, so that a test can make any of them fail.

`watch(callback)` calls `callback(operation, path, data)` before each call; the callback may raise (the call
then fails with that error) or, for a `write`, return a number of bytes n: the first n bytes are written and
the call then fails with "no space left on device", as a full disk does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Buffer = bytes | bytearray | memoryview
Watcher = Callable[[str, Path, Buffer | None], int | None]

_watchers: list[Watcher] = []


@contextmanager
def watch(callback: Watcher) -> Iterator[None]:
    """Call `callback(operation, path, data)` before every call of this module; see the module's docstring."""
    _watchers.append(callback)
    try:
        yield
    finally:
        _watchers.remove(callback)


def _tell(operation: str, path: Path, data: Buffer | None = None) -> int | None:
    cut = None
    for watcher in _watchers:
        answer = watcher(operation, path, data)
        cut = answer if cut is None else cut
    return cut


def make_folder(path: Path) -> None:
    """mkdir; the parents must exist."""
    _tell("mkdir", path)
    os.mkdir(path)


def open_new(path: Path) -> int:
    """A descriptor for writing to a file that does not exist yet."""
    _tell("open", path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)


def write(descriptor: int, path: Path, data: Buffer) -> None:
    """Write all of `data`; `path` is for messages and tests."""
    view = memoryview(data).cast("B")
    cut = _tell("write", path, view)
    if cut is not None:
        os.write(descriptor, view[:cut])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    done = 0
    while done < len(view):
        done += os.write(descriptor, view[done : done + (1 << 30)])


def sync(descriptor: int, path: Path) -> None:
    """fsync: the bytes are on the device when this returns."""
    _tell("fsync", path)
    os.fsync(descriptor)


def sync_path(path: Path) -> None:
    """fsync a file or folder by its path. Folders: where the system can open them (not on Windows)."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor, path)
    finally:
        os.close(descriptor)


def close(descriptor: int, path: Path) -> None:
    """close: some file systems report a failed write only here."""
    try:
        _tell("close", path)
    finally:
        os.close(descriptor)


def replace(source: Path, target: Path) -> None:
    """Rename; an existing file `target` is replaced in one step."""
    _tell("rename", target)
    os.replace(source, target)


def exchange(source: Path, target: Path) -> bool:
    """Swap two existing paths in one step. False where the system or the file system cannot."""
    _tell("exchange", target)
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    libc.renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    if libc.renameat2(here, os.fsencode(source), here, os.fsencode(target), swap) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(target))


def link(source: Path, target: Path) -> None:
    """A second name for the same file (its open handles stay valid); a copy where links cannot be made."""
    _tell("link", target)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def remove(path: Path) -> None:
    """Remove a file or a whole folder, if it is there."""
    _tell("remove", path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
