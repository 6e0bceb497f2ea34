"""Reading of files with bounded memory, and errors that name what a file is instead of what was expected.

open_regular(path)      # opens a regular file: never blocks on a pipe
read_json(path)         # one JSON object, strictly; read_json_array(path): one array
with naming(path): ...  # errors raised inside name the file
"""

import errno
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from headway.errors import CheckpointError, HeadwayError, as_error

LONGEST_JSON = 32 << 20
DEEPEST = 64
LONGEST_TEXT = 3000


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading, unbuffered, without blocking.

    Raises CheckpointError for a path that does not exist, may not be read, or is not a regular file (a folder, a pipe,
    a socket, a device)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb", buffering=0)
    os.close(descriptor)
    fault = os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "it is not a regular file"
    raise CheckpointError(f"cannot read {path}: {fault}")


def read_json(path: Path) -> dict[str, Any]:
    """Returns one JSON object of at most `LONGEST_JSON` bytes.

    Raises CheckpointError, naming the file and what it is instead (empty, LFS pointer, HTML, too long, not UTF-8), or
    its fault (a repeated key, a number that is NaN or infinite)."""
    value: dict[str, Any] = _read(path, dict)
    return value


def read_json_array(path: Path) -> list[Any]:
    """Returns one JSON array, read like the object of `read_json`."""
    value: list[Any] = _read(path, list)
    return value


def parse_json(raw: bytes) -> dict[str, Any]:
    """Returns one JSON object from UTF-8. Raises ValueError, also for NaN, infinities and numbers beyond them, for a
    key that is repeated in an object, and for more than `DEEPEST` levels."""
    value = _parsed(raw)
    if not isinstance(value, dict):
        raise ValueError(f"it {_not_of(dict, value)}")
    return value


def _read(path: Path, kind: type) -> Any:
    with open_regular(path) as file:
        size = file.seek(0, 2)
        if size > LONGEST_JSON:
            raise CheckpointError(
                f"{path} has {size:,} bytes, above the limit of {LONGEST_JSON:,} for a JSON file"
            )
        file.seek(0)
        raw = file.read()
    refuse_impostor(path, raw[:512], "a JSON file")
    with as_error(CheckpointError, f"{path} is not valid JSON", ValueError):
        value = _parsed(raw)
    if not isinstance(value, kind):
        raise CheckpointError(f"{path} {_not_of(kind, value)}")
    return value


def _not_of(kind: type, value: object) -> str:
    expected = "object" if kind is dict else "array"
    return f"must hold a JSON {expected}, but holds a {type(value).__name__}"


def _parsed(raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error.reason} at byte {error.start:,}") from error
    try:
        value = json.loads(
            text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_each_key_once
        )
        deep = _levels(value) > DEEPEST
    except RecursionError:
        deep = True
    if deep:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    return value


@contextmanager
def naming(path: Path, but: tuple[type[HeadwayError], ...] = ()) -> Iterator[None]:
    """Prefixes the file's path to HeadwayErrors raised inside that lack it, and bounds their length.

    Errors of the kinds `but`, which name a file already, pass unchanged."""
    try:
        yield
    except but:
        raise
    except HeadwayError as error:
        if str(path) in str(error):
            raise
        text = str(error).removeprefix(f"{path.name}: ")
        ending = f" ... ({len(text) - LONGEST_TEXT:,} more characters)" if len(text) > LONGEST_TEXT else ""
        raise type(error)(f"{path}: {text[:LONGEST_TEXT]}{ending}") from error


def refuse_impostor(path: Path, head: bytes, expected: str) -> None:
    """Raises CheckpointError if the first bytes show an empty file, a git-lfs pointer or an HTML page."""
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not head:
        cause = "it is empty (0 bytes): the download or copy failed; fetch it again"
    elif start.startswith(b"version https://git-lfs"):
        cause = (
            "it is a git-lfs pointer: the repository was cloned without its large files; "
            "run `git lfs pull` in it, or download the file itself"
        )
    elif start.startswith((b"<!doctype html", b"<html", b"<?xml", b"<head")):
        cause = "it is an HTML page: a download stored an error or log-in page; fetch the file again"
    else:
        return
    raise CheckpointError(f"{path} is not {expected}: {cause}")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:40]} is beyond the largest number, 1.8e308")
    return value


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"the key {twice[:80]!r} occurs twice")
    return value


def _levels(value: Any) -> int:
    """Returns how deep objects and arrays are nested."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    below = (_levels(item) for item in inner if isinstance(item, dict | list))
    return 1 + max(below, default=0)
