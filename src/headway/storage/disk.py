"""Every operating-system call of a save, one function each: these are the calls that can fail."""

import ctypes
import errno
import os
import shutil
import sys
from pathlib import Path

Buffer = bytes | bytearray | memoryview


class NewFile:
    """A newly created file, open for writing. Raises FileExistsError if the path exists."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        self.path, self._descriptor = path, os.open(path, flags, 0o666)

    def write(self, data: Buffer) -> None:
        """Appends all of `data`."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += os.write(self._descriptor, view[done : done + (1 << 30)])

    def sync(self) -> None:
        """Calls fsync: when it returns, the data is on the device."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file: some file systems report a failed write only here."""
        os.close(self._descriptor)


def make_folder(path: Path) -> None:
    """Creates a folder; its parent must exist."""
    os.mkdir(path)


def sync(path: Path) -> None:
    """Calls fsync on a file or folder; folders only if the system can open them (not on Windows)."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(source: Path, target: Path) -> None:
    """Renames `source` to `target` atomically; an existing file `target` is replaced."""
    os.replace(source, target)


def exchange(source: Path, target: Path) -> bool:
    """Swaps two existing paths atomically. Returns False if the system or the file system does not support it."""
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
    """Makes a hard link, whose open handles stay valid; a copy if links are not supported."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def free(path: Path) -> int:
    """Returns the bytes that this user may still write on the disk of an existing path."""
    return shutil.disk_usage(path).free


def remove(path: Path) -> None:
    """Removes a file or a folder with its content; does nothing if it is absent."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
