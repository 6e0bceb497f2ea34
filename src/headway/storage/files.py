"""Atomic writing of files and folders. Reading, and errors for files of another kind, are in `reading`.

    atomic_write(path, data)                  # data: bytes, str, or a function that is called with `put(bytes)`
    with atomic_folder(path) as folder: ...   # fill `folder`; on success it *is* `path`, else nothing changed
    current_folder(path)                      # the folder with the last complete save of `path`

Order of a save: write a temporary sibling, fsync every file and folder in it, rename, fsync the parent. At every moment
`current_folder(path)` is either the whole previous folder or the whole new one. A folder that replaces another is
swapped in one step if the system can (Linux `renameat2`); otherwise by two renames, and a process that dies between the
two leaves the previous folder as `.NAME.previous`, which
`current_folder` finds. A single file is replaced by one rename.
"""

import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headway.errors import CheckpointError
from headway.storage import disk

Put = Callable[[disk.Buffer], None]
Writer = Callable[[Put], None]


def atomic_write(
    path: str | Path, data: disk.Buffer | str | Writer, *, check: Callable[[Path], object] = lambda path: None
) -> None:
    """Writes one file so that `path` has either its previous content or all of `data`, whatever fails.

    `data` is bytes, text (UTF-8), or a function that is called with `put`, which takes each piece of bytes. `check` is
    called with the finished file before it is renamed to `path`; if it raises, `path` stays as it was. Raises
    CheckpointError, naming the cause, for an error of the system (disk full, no permission).
    """
    path = Path(os.path.realpath(path))
    temporary = _sibling(path)
    try:
        write_file(temporary, data)
        check(temporary)
        disk.replace(temporary, path)
        disk.sync(path.parent)
    except OSError as error:
        raise CheckpointError(_lost(path, error)) from error
    finally:
        _discard(temporary)


@contextmanager
def atomic_folder(path: str | Path, *, keep: Callable[[str], bool] = lambda name: False) -> Iterator[Path]:
    """Replaces `path` by a new folder as a whole, in one step, when the block ends without an exception.

    Yields the temporary sibling, which may be written to by any means; every file and folder in it is fsynced at the
    end. An existing `path` is replaced and then removed; those of its entries whose name satisfies `keep(name)` and
    that the block did not write are carried over (as hard links, so that open handles to them stay valid). Temporary
    folders that dead processes of this machine left are removed; parents are created. An OSError becomes a
    CheckpointError that names what failed.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"cannot save the folder {path}: a file of that name exists; use another name")
    temporary = _sibling(path)
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _sweep(path)
            disk.make_folder(temporary)
            yield temporary
            _carry(current_folder(path), temporary, keep)
            _sync_tree(temporary)
            _swap(temporary, path)
        except OSError as error:
            raise CheckpointError(_lost(path, error)) from error
    finally:
        _discard(temporary)


def remove_folder(path: Path) -> None:
    """Removes a folder atomically: it is renamed before its content is deleted.

    If the process is killed in between, the next `atomic_folder` in the same parent removes the rest."""
    temporary = _sibling(path)
    disk.replace(path, temporary)
    disk.remove(temporary)


def write_file(path: Path, data: disk.Buffer | str | Writer) -> None:
    """Writes a file that does not exist yet and fsyncs it; meant for the body of `atomic_folder`."""
    file = disk.NewFile(path)
    try:
        if callable(data):
            data(file.write)
        else:
            file.write(data.encode() if isinstance(data, str) else data)
        file.sync()
    finally:
        file.close()


def current_folder(path: str | Path) -> Path:
    """Returns `path`, or the previous folder that a save moved aside before its process was killed."""
    path = Path(os.path.realpath(path))
    aside = _aside(path)
    return aside if not path.exists() and aside.exists() else path


def json_text(value: dict[str, Any] | list[Any]) -> str:
    """Returns a JSON object or array as text: keys in the given order, two spaces, a newline at the end, no NaN."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _swap(temporary: Path, path: Path) -> None:
    aside = _aside(path)
    if not path.exists():
        disk.replace(temporary, path)
        disk.sync(path.parent)
        _discard(aside)
        return
    disk.remove(aside)
    if disk.exchange(temporary, path):  # the old folder is now `temporary`, which the caller removes
        try:
            disk.sync(path.parent)
        except OSError:
            disk.exchange(temporary, path)
            raise
        return
    disk.replace(path, aside)  # until the next rename there is no `path`: `current_folder` returns `aside`
    try:
        disk.replace(temporary, path)
        disk.sync(path.parent)
    except OSError:
        if path.exists():
            os.replace(path, temporary)
        os.replace(aside, path)
        raise
    _discard(aside)


def _carry(old: Path, new: Path, keep: Callable[[str], bool]) -> None:
    for entry in sorted(old.iterdir() if old.is_dir() else ()):
        if keep(entry.name) and not (new / entry.name).exists():
            _link_tree(entry, new / entry.name)


def _link_tree(source: Path, target: Path) -> None:
    if source.is_symlink() or not source.is_dir():
        disk.link(source, target)
        return
    disk.make_folder(target)
    for entry in sorted(source.iterdir()):
        _link_tree(entry, target / entry.name)


def _sync_tree(folder: Path) -> None:
    for entry in (*sorted(folder.rglob("*"), reverse=True), folder):
        if not entry.is_symlink():
            disk.sync(entry)


def _sibling(path: Path) -> Path:
    return path.parent / f".{path.name}.partial-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def _aside(path: Path) -> Path:
    return path.parent / f".{path.name}.previous"


def _sweep(path: Path) -> None:
    """Removes the temporary files that dead processes of this machine left beside `path`."""
    temporary_name = re.compile(rf"\..+\.partial-{re.escape(socket.gethostname())}-(\d+)-[0-9a-f]{{8}}")
    for entry in path.parent.iterdir():
        match = temporary_name.fullmatch(entry.name)
        if match is not None and int(match[1]) != os.getpid() and not _alive(int(match[1])):
            disk.remove(entry)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _discard(temporary: Path) -> None:
    with suppress(OSError):  # the save's own outcome matters more, and the next save removes it
        disk.remove(temporary)


def _lost(path: Path, error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    return (
        f"could not save {path}: {error.strerror or error}{where}; "
        "the previous content is intact, or already replaced by all of the new data"
    )
