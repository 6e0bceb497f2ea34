"""`headway download OWNER/NAME` and `headway push FOLDER OWNER/NAME`: models from the Hugging Face Hub, and to it."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli._shared import AllowPickleOption, FolderArgument

NameArgument = Annotated[str, typer.Argument(metavar="OWNER/NAME", help="a repository of the Hub")]


def download(
    name: NameArgument,
    out: Annotated[
        Path | None, typer.Option("--out", help="folder to write [default: where the Hub's library keeps it]")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="branch, tag or commit")] = None,
    allow_pickle: AllowPickleOption = False,
) -> None:
    """Fetch the files of a model, without pickles; the folder is printed. HF_TOKEN opens what is private or gated."""
    from headway.checkpoints import hub

    print(hub.download(name, out, revision=revision, allow_pickle=allow_pickle))


def push(
    folder: FolderArgument,
    name: NameArgument,
    private: Annotated[
        bool, typer.Option("--private", help="make a private repository, if none is there")
    ] = False,
    message: Annotated[str, typer.Option("--message", help="of the commit")] = "A model of headway",
) -> None:
    """Publish a model or an adapter, with a short card where it has none; the address is printed. HF_TOKEN must be a
    token that may write."""
    from headway.checkpoints import hub

    print(hub.push(folder, name, private=private, message=message))
