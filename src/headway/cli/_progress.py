"""Work that takes minutes, shown on stderr: a bar on a terminal, one line elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headway.cli._shared import note

Advance = Callable[[int, int], None]
"""(done, total)"""


@contextmanager
def progress(what: str) -> Iterator[Advance]:
    """Say `what` is being done; on a terminal with a bar, which what is yielded moves, and which goes in the end."""
    if not sys.stderr.isatty():
        note(f"{what} ...")
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
