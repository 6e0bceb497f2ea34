"""What a process takes."""

from pathlib import Path
from resource import getpagesize


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()
