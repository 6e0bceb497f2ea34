"""Shared by several commands: the model that they run, the endpoints that they ask, how torch is started, texts are
read, work is shown and reports are printed. Imports nothing heavy."""

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

    compress: keep bf16 weights in 11 bits, without loss: less memory, and faster decoding
    dequantize: plain weights in place of the codes of 4 to 8 bits that files hold
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
        """`headway.load` with these options, and more."""
        set_threads(self.threads)
        from headway.api import load

        how = attributes(self, "dtype", "backend", "compress", "dequantize")
        return load(self.model, adapter=self.adapter or (), any_base=self.any_base, **how, **more)


@dataclass(frozen=True, kw_only=True)
class BatchRun(ModelRun):
    """A model that reads rows in batches, and a report.

    batch_size: rows computed at once; changes no result
    """

    batch_size: Count = 32
    json: bool = False


@dataclass(frozen=True)
class TextsRun(BatchRun):
    """A model that reads texts.

    texts: texts; from standard input, one a line, when there are none
    file: texts, one a line (.gz may be read)
    """

    texts: Annotated[list[str] | None, says(metavar="TEXT")] = None
    _: KW_ONLY
    file: Path | None = None

    def read(self) -> list[str]:
        """The texts of the arguments, of a file, or of standard input. Raises DataError when there are none."""
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
    """Use `threads` CPU threads in torch; None leaves what torch chose."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def read_stdin(read: Callable[[], str] | None = None) -> str:
    """The whole of standard input, or what `read` reads of it. Raises DataError unless it is UTF-8."""
    text = (read or sys.stdin.read)()
    try:
        text.encode()  # a byte that is no UTF-8 is a lone surrogate here: see `headway.cli.main`
    except UnicodeEncodeError as error:
        at = len(text[: error.start].encode())
        raise DataError(f"standard input: not UTF-8 at byte {at}") from None
    return text


def read_prompt() -> str:
    """The prompt from standard input, without the line end that `echo` adds."""
    if sys.stdin.isatty():
        note("the prompt, ended by Ctrl-D:")
    return read_stdin().removesuffix("\n")


def check_timeout(timeout: float | None, *sources: str) -> None:
    """ConfigError for a timeout where no source is a server."""
    from headway.endpoints import is_server

    if timeout is not None and not any(map(is_server, sources)):
        raise ConfigError("--timeout is of servers, and none is asked; leave it out")


def opened(source: str, timeout: float | None) -> "Endpoint":
    """The endpoint of an address; what it says of failed tries goes to stderr."""
    from headway.endpoints import is_server, open_endpoint

    return open_endpoint(source, timeout=timeout if is_server(source) else None, say=note)


def attributes(value: object, *names: str) -> dict[str, Any]:
    """These attributes of a value by name, as a report has them."""
    return {name: getattr(value, name) for name in names}


def note(message: str) -> None:
    """Print progress or a remark on stderr, so that stdout stays a result that can be piped."""
    print(message, file=sys.stderr, flush=True)


Advance = Callable[[int, int], None]
"""(done, total)"""
SILENCE = 30.0  # seconds after which a log is told how far it is


@contextmanager
def progress(what: str, *, only_on_terminals: bool = False) -> Iterator[Advance]:
    """Say `what` is being done; on a terminal with a bar, which the yielded function moves, and which goes in the end.

    Elsewhere a line says it, and another one how far it is whenever `SILENCE` has passed, unless `only_on_terminals`:
    what is done for a program, text by text, needs none."""
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
    """Print a report on stdout: as one JSON document (see `print_json`), or as `text`."""
    if json:
        print_json(value)
    else:
        print(text)


def print_json(value: Any) -> None:
    """Print one JSON document on stdout. Dataclasses, paths, tuples and numpy or torch numbers are converted;
    infinity and NaN, which JSON lacks, become null."""
    print(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False))
