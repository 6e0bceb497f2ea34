"""`headway download OWNER/NAME` and `headway push FOLDER OWNER/NAME`: models from the Hugging Face Hub, and to it."""

from pathlib import Path
from typing import Annotated

from headway.cli._options import Model, says

Repository = Annotated[str, says(metavar="OWNER/NAME", help="a repository of the Hub")]


def download(
    name: Repository, *, out: Path | None = None, revision: str | None = None, allow_pickle: bool = False
) -> None:
    """Fetch the files of a model, without pickles; the folder is printed. HF_TOKEN opens what is private or gated.

    out: folder to write [default: where the Hub's library keeps it]
    revision: branch, tag or commit
    """
    from headway.checkpoints import hub

    print(hub.download(name, out, revision=revision, allow_pickle=allow_pickle))


def push(
    folder: Model, name: Repository, *, private: bool = False, message: str = "A model of headway"
) -> None:
    """Publish a model or an adapter, with a short card where it has none; the address is printed. HF_TOKEN must be a
    token that may write.

    private: make a private repository, if none is there
    message: of the commit
    """
    from headway.checkpoints import hub

    print(hub.push(folder, name, private=private, message=message))
