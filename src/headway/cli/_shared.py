"""What several commands share: options, tables, progress, JSON. Imports nothing heavy."""

import json
import os
import sys
from typing import Annotated, Any

import typer

from headway.report import cell, plain, size, table

__all__ = [
    "BackendOption",
    "JsonOption",
    "KvCacheOption",
    "ThreadsOption",
    "cell",
    "note",
    "plain",
    "print_json",
    "set_threads",
    "share_cores",
    "size",
    "table",
]

JsonOption = Annotated[bool, typer.Option("--json", help="print the report as JSON on stdout")]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", min=1, envvar="HEADWAY_THREADS", help="CPU threads [default: torch's]"),
]
BackendOption = Annotated[
    str,
    typer.Option(
        "--backend",
        envvar="HEADWAY_BACKEND",
        help="attention backend; fails rather than falls back",
    ),
]


KvCacheOption = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype", help="auto | int8: what caches store; int8 is rounded, half of bfloat16"
    ),
]


def set_threads(threads: int | None) -> None:
    """Use `threads` CPU threads in torch; None leaves what torch chose."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def share_cores() -> None:
    """Let waiting threads sleep early. To be called before torch is imported; what the environment says
    goes first.

    OpenMP's threads spin for about a millisecond at every barrier. Where other programs run on the same
    cores, they spin away the time slices that they wait for: measured on 2 busy cores, a small model trains
    2 to 4 times slower for it."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def note(message: str) -> None:
    """Progress and remarks go to stderr, so that stdout stays a result that can be piped."""
    print(message, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One JSON document on stdout. Dataclasses, paths, tuples and numpy or torch numbers are understood;
    infinity and NaN, which JSON lacks, become null."""
    print(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False))
