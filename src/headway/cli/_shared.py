"""Code that several commands share: options of models and texts, endpoints, torch's threads, standard input, progress
and reports. Imports nothing heavy."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli._options import Count, says
from headway.errors import ConfigError, DataError
from headway.report import plain

if TYPE_CHECKING:
    from headway.endpoints import Endpoint


@dataclass(frozen=True)
class ModelRun:
    """The model that a command runs, and how.

    compress: store bf16 weights in 11 bits, losslessly: less memory, and faster decoding
    dequantize: expand the file's weights of 4 to 8 bits
    """

    model: str
    _: KW_ONLY
    dtype: str = "auto"
    adapter: list[Path] | None = None
    any_base: bool = False
    compress: bool = False
    dequantize: bool = False
    threads: int | None = None
    backend: str = "auto"

    def load(self, **more: Any) -> Any:
        """Returns `headway.load` with these options and more."""
        set_threads(self.threads)
        from headway.api import load

        how = attributes(self, "dtype", "backend", "compress", "dequantize")
        return load(self.model, adapter=self.adapter or (), any_base=self.any_base, **how, **more)


@dataclass(frozen=True, kw_only=True)
class BatchRun(ModelRun):
    """A model that reads rows in batches, and a report.

    batch_size: rows computed at once; does not change results
    """

    batch_size: Count = 32
    json: bool = False


@dataclass(frozen=True)
class TextsRun(BatchRun):
    """A model that reads texts.

    texts: texts; without any, they are read from standard input, one per line
    file: file of texts, one per line (may be .gz)
    """

    texts: Annotated[list[str] | None, says(metavar="TEXT")] = None
    _: KW_ONLY
    file: Path | None = None

    def read(self) -> list[str]:
        """Returns the texts of the arguments, the file, or standard input. Raises DataError if there are none."""
        if self.texts and self.file is not None:
            raise typer.BadParameter("texts are given twice, as arguments and as --file")
        if self.file is not None:
            from headway.data.pairs import read_lines

            return read_lines(self.file)
        if self.texts and self.texts != ["-"]:
            return self.texts
        if sys.stdin.isatty():
            note("texts, one a line, ended by Ctrl-D:")
        lines = [line for line in read_stdin().splitlines() if line.strip()]
        if not lines:
            raise DataError("no texts: give them as arguments, or one a line on standard input")
        return lines


def set_threads(threads: int | None) -> None:
    """Sets the number of CPU threads of torch; None leaves torch's choice."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def read_stdin(read: Callable[[], str] | None = None) -> str:
    """Returns all of standard input, or what `read` reads of it. Raises DataError unless it is UTF-8."""
    text = (read or sys.stdin.read)()
    try:
        text.encode()  # an invalid byte of the input is a lone surrogate here: see `headway.cli.main`
    except UnicodeEncodeError as error:
        at = len(text[: error.start].encode())
        raise DataError(f"standard input: not UTF-8 at byte {at}") from None
    return text


def read_prompt() -> str:
    """Returns the prompt from standard input, without the line break that `echo` adds."""
    if sys.stdin.isatty():
        note("the prompt, ended by Ctrl-D:")
    return read_stdin().removesuffix("\n")


def check_timeout(timeout: float | None, *sources: str) -> None:
    """Raises ConfigError for a timeout if no source is a server."""
    from headway.endpoints import is_server

    if timeout is not None and not any(map(is_server, sources)):
        raise ConfigError("--timeout is only for servers, and no server is given; leave it out")


def opened(source: str, timeout: float | None) -> "Endpoint":
    """Returns the endpoint of an address; its messages about failed tries go to stderr."""
    from headway.endpoints import is_server, open_endpoint

    return open_endpoint(source, timeout=timeout if is_server(source) else None, say=note)


def attributes(value: object, *names: str) -> dict[str, Any]:
    """Returns these attributes of a value, by name."""
    return {name: getattr(value, name) for name in names}


def note(message: str) -> None:
    """Prints progress or a note on stderr, so that stdout holds only the result."""
    print(message, file=sys.stderr, flush=True)


Advance = Callable[[int, int], None]
"""Reports progress: (done, total)."""
SILENCE = 30.0  # seconds between two lines of progress in a log


@contextmanager
def progress(what: str, *, only_on_terminals: bool = False) -> Iterator[Advance]:
    """Shows that `what` is being done: on a terminal as a bar, which the yielded function advances, and which is
    removed at the end.

    Elsewhere one line says so, and another reports the progress every `SILENCE` seconds, unless `only_on_terminals`:
    commands that programs call for single texts print none."""
    if not sys.stderr.isatty():
        if not only_on_terminals:
            note(f"{what} ...")
        last = time.monotonic()

        def advance(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= SILENCE and not only_on_terminals:
                last = time.monotonic()
                note(f"{what}: {done} of {total}")

        yield advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_report(value: Any, text: str, json: bool) -> None:
    """Prints a report on stdout: as one JSON document (see `print_json`), or as `text`."""
    if json:
        print_json(value)
    else:
        print(text)


def print_json(value: Any) -> None:
    """Prints one JSON document on stdout. Dataclasses, paths, tuples and numpy or torch numbers are converted; infinity
    and NaN, which JSON lacks, become null."""
    print(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False))
