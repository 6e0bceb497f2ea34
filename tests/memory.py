"""Memory of a process."""

from pathlib import Path
from resource import getpagesize


def resident() -> int:
    """Returns the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()
