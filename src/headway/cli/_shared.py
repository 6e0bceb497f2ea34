"""What several commands do: start torch, read texts, print. Imports nothing heavy."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from headway.errors import DataError
from headway.report import plain


def application(group: str | None = None) -> typer.Typer:
    """A typer application in the one style of the command line; with `group`, the help text of a command that
    has commands of its own (`headway surgery window`)."""
    return typer.Typer(
        add_completion=False,
        no_args_is_help=group is not None,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
        help=group,
    )


def set_threads(threads: int | None) -> None:
    """Use `threads` CPU threads in torch; None leaves what torch chose."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def share_cores() -> None:
    """Let waiting OpenMP threads sleep early. Call it before torch is imported; a variable that is set in the
    environment takes precedence.

    OpenMP's threads spin for about a millisecond at every barrier. Where other programs run on the same
    cores, they spin away the time slices that they wait for: measured on 2 busy cores, a small model trains
    2 to 4 times slower for it."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def read_stdin(read: Callable[[], str] | None = None) -> str:
    """The whole of standard input, or what `read` reads of it. Raises DataError unless it is UTF-8."""
    try:
        return (read or sys.stdin.read)()
    except UnicodeDecodeError as error:
        raise DataError(f"standard input: not UTF-8 at byte {error.start}") from None


def read_prompt() -> str:
    """The prompt from standard input, without the line end that `echo` adds."""
    if sys.stdin.isatty():
        note("the prompt, ended by Ctrl-D:")
    return read_stdin().removesuffix("\n")


def read_texts(texts: list[str] | None, file: Path | None = None) -> list[str]:
    """The texts of the arguments, of a file, or of standard input. Raises DataError when there are none."""
    if texts and file is not None:
        raise typer.BadParameter("texts are given twice, as arguments and as --file")
    if file is not None:
        from headway.data.pairs import read_lines

        return read_lines(file)
    if texts and texts != ["-"]:
        return texts
    if sys.stdin.isatty():
        note("texts, one a line, ended by Ctrl-D:")
    lines = [line for line in read_stdin().splitlines() if line.strip()]
    if not lines:
        raise DataError("no texts: give them as arguments, or one a line on standard input")
    return lines


def attributes(value: object, *names: str) -> dict[str, Any]:
    """These attributes of a value by name, as a report has them."""
    return {name: getattr(value, name) for name in names}


def note(message: str) -> None:
    """Print progress or a remark on stderr, so that stdout stays a result that can be piped."""
    print(message, file=sys.stderr, flush=True)


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
