"""Files of lines that one process at a time appends to, and that a dying one leaves whole but for its last line."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from headway.errors import ConfigError


def open_lines(path: Path, in_use: str) -> IO[bytes]:
    """A file, made where there is none, at the beginning of its lines; a last one without its end is cut off.

    Raises ConfigError, with the words `in_use`, where another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(in_use) from None
    file.seek(0)
    file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
    file.seek(0)
    return file
