"""`headway surgery longformer`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli._options import (
    AllowPickleOption,
    FolderArgument,
    JsonOption,
    OverwriteOption,
    TargetArgument,
    ThreadsOption,
)
from headway.cli._shared import note, print_json, set_threads
from headway.report import table

if TYPE_CHECKING:
    from headway.surgery import Lengthened


def longformer(
    model: FolderArgument,
    out: TargetArgument,
    context: Annotated[
        int, typer.Option("--context", min=1, help="tokens of the longest row of the new model")
    ] = 4096,
    window: Annotated[
        str,
        typer.Option(
            "--window", help="others that a token sees, half on each side: one number, or one for each layer"
        ),
    ] = "512",
    text: Annotated[
        Path | None,
        typer.Option("--text", help="a text whose beginning both models read [default: random ids]"),
    ] = None,
    allow_pickle: AllowPickleOption = False,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """A BERT or RoBERTa for long texts: windows, global tokens, its positions copied end to end."""
    from headway.checkpoints import load_folder
    from headway.data import texts
    from headway.errors import ConfigError
    from headway.surgery import lengthen

    set_threads(threads)
    try:
        sizes = [int(part) for part in window.split(",")]
    except ValueError:
        raise ConfigError(
            f"surgery longformer: --window is one even number, or one for each layer joined by commas, got {window!r}"
        ) from None
    folder = load_folder(model, allow_pickle=allow_pickle)
    note(f"reading {folder.path}, comparing short rows before and after")
    words = None if text is None else next(texts(text), "")
    given = sizes[0] if len(sizes) == 1 else sizes
    done = lengthen(folder, out, context, given, text=words, overwrite=overwrite)
    if json:
        print_json(done)
    else:
        print(to_text(done))


def to_text(done: "Lengthened") -> str:
    """The report for a terminal."""
    lines = [f"{done.source} -> {done.target}; transformers {done.transformers}"]
    lines += [f"  {name}: {a} -> {b}" for name, a, b in done.changed]
    every, seen = done.pairs
    cells = [
        (d.tokens, "the first" if d.marked else "none", d.difference, d.largest) for d in done.differences
    ]
    return "\n".join(
        [
            *lines,
            "",
            table(
                ("what", "before", "after"),
                [("parameters", *done.parameters), ("longest row", *done.context)],
            ),
            "",
            f"  scores of a row of {done.context[1]}: {seen}, {seen / every:.1%} of the {every} if all saw all",
            f"  rows of up to {done.unchanged} tokens see what they saw; largest difference of an output:",
            table(("tokens", "global", "difference", "largest output"), cells),
        ]
    )
