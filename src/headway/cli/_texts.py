"""What the commands for texts share: where texts come from, and options."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from headway.cli._shared import note
from headway.errors import DataError

TextsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="TEXT", help="texts; from standard input, one a line, when there are none"),
]
FileOption = Annotated[Path | None, typer.Option("--file", help="texts, one a line (.gz may be read)")]
BatchSizeOption = Annotated[
    int, typer.Option("--batch-size", min=1, help="texts at once; it changes no result")
]
CutOption = Annotated[
    bool, typer.Option("--cut", help="of a text that is too long read the beginning; else it is an error")
]


def given_texts(texts: list[str] | None, file: Path | None = None) -> list[str]:
    """The texts of the arguments, of a file, or of standard input. Raises DataError when there are none."""
    if texts and file is not None:
        raise typer.BadParameter("texts are given twice, as arguments and as --file")
    if file is not None:
        from headway.train.pairs import read_lines

        return read_lines(file)
    if texts and texts != ["-"]:
        return texts
    if sys.stdin.isatty():
        note("texts, one a line, ended by Ctrl-D:")
    try:
        lines = [line for line in sys.stdin.read().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError(f"standard input: not UTF-8 at byte {error.start}") from None
    if not lines:
        raise DataError("no texts: give them as arguments, or one a line on standard input")
    return lines
