"""A lock that lets only one run at a time use a folder.

    with locked(Path("runs/mine")) as remark:     # ConfigError names the process that uses it
        ...

The lock is the kernel's (`flock`) on FOLDER/run.lock, whose content names its holder: process, host, and start time.
The kernel releases it when the process ends, however it ends, so that a file left behind by a killed run locks nothing.

On network file systems the lock excludes other hosts only if it is passed on to the server (NFS since version 4,
without the mount options `nolock` and `local_lock`). A lock file that names another host is therefore never taken over:
whether that process is alive cannot be seen from here. File systems without locks (ENOLCK, ENOTSUP, ENOSYS: NFS without
lockd, Lustre without `-o flock`, some FUSE ones) cannot keep a second run out; `remark` says so.
"""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from headway.errors import ConfigError

LOCK = "run.lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


@contextmanager
def locked(folder: Path) -> Iterator[str | None]:
    """Locks `folder` for this process while open. Creates it if necessary; a created folder that is empty at the end is
    removed.

    Yields None, or a remark if the file system has no locks. Raises ConfigError if another run uses the folder."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    path = folder / LOCK
    try:
        descriptor, remark = _acquire(path)
        try:
            _sign(descriptor, path)
            try:
                yield remark
            finally:
                path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
    finally:
        for empty in missing:
            with suppress(OSError):
                empty.rmdir()


def _acquire(path: Path) -> tuple[int, str | None]:
    """Opens and locks the file `path`; returns its descriptor, and a remark if the file system has no locks.

    The holder removes its file before it closes it. So a process may lock a file that has no name any more, while a
    third one creates and locks a new file: a lock only counts if the locked file still has the name."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # the run that had created the folder has just removed it
            continue
        except FileExistsError:  # it was removed between mkdir's two checks, or it is no folder
            if path.parent.exists():
                raise
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(descriptor, path):
                return descriptor, None
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise ConfigError(
                f"{path.parent} is in use by {_named(holder)}; two runs in one folder would destroy each other's "
                "files. Wait for it, stop it, or choose another folder with --out (out=...)"
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                os.close(descriptor)
                raise
            return descriptor, (
                f"{path.parent} cannot be locked ({error.strerror}): this file system has no locks, so that nothing "
                "keeps a second run out of this folder"
            )
        os.close(descriptor)  # its holder has removed this file: another one may have the name now


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sign(descriptor: int, path: Path) -> None:
    prior = _holder(descriptor)
    if prior and prior.get("host") != socket.gethostname():
        raise ConfigError(
            f"{path.parent} is in use by {_named(prior)}, or was until that process died; this cannot be checked from "
            f"another host. If it is gone, remove {path}; else wait for it, or choose another folder with --out "
            "(out=...)"
        )
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    record = {"process": os.getpid(), "host": socket.gethostname(), "since": since}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(record) + "\n").encode(), 0)


def _holder(descriptor: int) -> dict[str, Any]:
    try:
        return dict(json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):  # its process has not finished writing
        return {}


def _named(holder: dict[str, Any]) -> str:
    if not holder:
        return "another run that has just begun"
    return f"process {holder.get('process')} on host {holder.get('host')} since {holder.get('since')}"
