"""Work that takes minutes, shown on stderr: a bar on a terminal, elsewhere a line when it begins and one by time."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headway.cli._shared import note

Advance = Callable[[int, int], None]
"""(done, total)"""
SILENCE = 30.0  # seconds after which a log is told how far it is


@contextmanager
def progress(what: str, *, only_on_terminals: bool = False) -> Iterator[Advance]:
    """Say `what` is being done; on a terminal with a bar, which what is yielded moves, and which goes in the end.

    Elsewhere a line says it, and another one how far it is whenever `SILENCE` has passed, unless `only_on_terminals`:
    what is done for a program, text by text, needs none."""
    if not sys.stderr.isatty():
        if not only_on_terminals:
            note(f"{what} ...")
        said = time.monotonic()

        def advance(done: int, total: int) -> None:
            nonlocal said
            if time.monotonic() - said >= SILENCE and not only_on_terminals:
                said = time.monotonic()
                note(f"{what}: {done} of {total}")

        yield advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
