"""One run in a folder at a time.

    with locked(Path("runs/mine")) as remark:     # ConfigError says who uses it
        ...

The lock is the kernel's (`flock`) on FOLDER/run.lock, whose content names its holder: process, host, since when. The
kernel releases it when the process ends, however it ends, so that what a killed run leaves behind locks nothing.

On network file systems a lock excludes other hosts where it is passed on to the server (NFS since version 4, without
the mount options `nolock` and `local_lock`). A lock file that names another host is therefore never taken over: whether
its process lives cannot be seen from here. File systems without locks (ENOLCK, ENOTSUP, ENOSYS: NFS without lockd,
Lustre without `-o flock`, some FUSE ones) keep no second run out; `remark` says so.
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
    """Keep `folder` for this process, and make it where there is none; one that is still empty in the end goes again.

    Yields None, or a remark where the file system has no locks. Raises ConfigError when another run uses the folder."""
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
    """A descriptor of the file that has the name `path`, locked; and a remark where it could not be."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # a folder went with the run that had made it
            continue
        except FileExistsError:  # so it did between mkdir's two looks, or it is no folder
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
        os.close(descriptor)  # its holder removed it: another file may have the name now


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sign(descriptor: int, path: Path) -> None:
    prior = _holder(descriptor)
    if prior and prior.get("host") != socket.gethostname():
        raise ConfigError(
            f"{path.parent} is in use by {_named(prior)}, or was when that process died: it runs on another host, so "
            f"nobody can tell from here. If it is gone, remove {path}; else wait for it, or choose another folder with "
            "--out (out=...)"
        )
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    record = {"process": os.getpid(), "host": socket.gethostname(), "since": since}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(record) + "\n").encode(), 0)


def _holder(descriptor: int) -> dict[str, Any]:
    try:
        return dict(json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):  # its process has only begun to write
        return {}


def _named(holder: dict[str, Any]) -> str:
    if not holder:
        return "another run that has just begun"
    return f"process {holder.get('process')} on host {holder.get('host')} since {holder.get('since')}"
