"""Arguments and options that several commands have, each stated once. Imports nothing heavy."""

from pathlib import Path
from typing import Annotated

import typer

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="a model folder, or an id of the Hugging Face Hub")
]
FolderArgument = Annotated[Path, typer.Argument(help="a Hugging Face folder")]
TargetArgument = Annotated[Path, typer.Argument(help="folder to write")]
TextsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="TEXT", help="texts; from standard input, one a line, when there are none"),
]

JsonOption = Annotated[bool, typer.Option("--json", help="print the report as JSON on stdout")]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", min=1, envvar="HEADWAY_THREADS", help="CPU threads [default: torch's]"),
]
BackendOption = Annotated[
    str,
    typer.Option(
        "--backend", envvar="HEADWAY_BACKEND", help="attention backend; fails rather than falls back"
    ),
]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="float32, bfloat16, ... [default: the file's]")
]
KvCacheOption = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype", help="auto | int8: what caches store; int8 is rounded, half of bfloat16"
    ),
]

AllowPickleOption = Annotated[bool, typer.Option("--allow-pickle", help="read pickles (weights only)")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="replace the model in the target folder")]

FileOption = Annotated[Path | None, typer.Option("--file", help="texts, one a line (.gz may be read)")]
BatchSizeOption = Annotated[
    int, typer.Option("--batch-size", min=1, help="rows computed at once; changes no result")
]
TruncateOption = Annotated[
    bool, typer.Option("--cut", help="truncate texts that are too long; without it they are an error")
]
RowOption = Annotated[
    int | None,
    typer.Option("--context", min=2, help="tokens per row [default: the trained context, at most 2048]"),
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", min=1, help="evaluate only the first N tokens of the text")
]
