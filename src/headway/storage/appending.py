"""Files of lines that one process at a time appends to; if it dies, all lines but the last are complete."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from headway.errors import ConfigError


def open_lines(path: Path, in_use: str) -> IO[bytes]:
    """Opens a file of lines at its beginning for reading and appending, and locks it; an incomplete last line is cut
    off.

    The file is created if absent. Raises ConfigError with the message `in_use` if another process has locked it."""
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
