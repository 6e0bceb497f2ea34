"""Every operating-system call that a save makes, one function each: what can fail is listed here."""

import ctypes
import errno
import os
import shutil
import sys
from pathlib import Path

Buffer = bytes | bytearray | memoryview


class NewFile:
    """A file that did not exist yet, open for writing."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        self.path, self._descriptor = path, os.open(path, flags, 0o666)

    def write(self, data: Buffer) -> None:
        """Append all of `data`."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += os.write(self._descriptor, view[done : done + (1 << 30)])

    def sync(self) -> None:
        """fsync: the bytes are on the device when this returns."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """close: some file systems report a failed write only here."""
        os.close(self._descriptor)


def make_folder(path: Path) -> None:
    """mkdir; the parents must exist."""
    os.mkdir(path)


def sync(path: Path) -> None:
    """fsync a file or folder. Folders: where the system can open them (not on Windows)."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(source: Path, target: Path) -> None:
    """Rename; an existing file `target` is replaced in one step."""
    os.replace(source, target)


def exchange(source: Path, target: Path) -> bool:
    """Swap two existing paths in one step. False where the system or the file system cannot."""
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
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def free(path: Path) -> int:
    """Bytes that this user may still write on the disk of an existing path."""
    return shutil.disk_usage(path).free


def remove(path: Path) -> None:
    """Remove a file or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
