"""`headway data [NAME] [FILES ...]`: prepares the data of the shipped recipes from local files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from headway.cli._options import says
from headway.cli._shared import print_report
from headway.errors import ConfigError
from headway.report import size


def command(
    name: Annotated[str | None, says(metavar="NAME")] = None,
    files: Annotated[list[Path] | None, says(metavar="FILES")] = None,
    *,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Prepare the data set of a shipped recipe from files that you have; nothing is downloaded. Without NAME, list the
    data sets: the files that each is made from, where to get them, licence and size.

    name: name of the data set in the recipe, such as text8.txt
    files: files that it is made from, gzipped or not
    out: file to write [default: NAME, here]
    """
    from headway.data.datasets import DATASETS, prepare

    if name is None:
        if out is not None:
            raise ConfigError("data: --out needs the NAME of a data set")
        columns = ("what", "files", "source", "licence", "size")
        listing = {
            key: {column: getattr(dataset, column) for column in columns} for key, dataset in DATASETS.items()
        }
        print_report(listing, to_text(listing), json)
        return
    path = Path(name) if out is None else out
    count = prepare(name, files or [], path)
    dataset = DATASETS[name]
    report = {"written": str(path), "bytes": count, "licence": dataset.licence, "source": dataset.source}
    print_report(
        report, f"written: {path}, {size(count)}\nlicence: {dataset.licence}\nsource: {dataset.source}", json
    )


def to_text(listing: Mapping[str, Mapping[str, str]]) -> str:
    """Returns three lines per data set: what it is, the files that it is made from, and where to get them."""
    sets = (
        f"{name}: {entry['what']}\n  of {entry['files'] or entry['source']}\n"
        f"  {entry['source']}; {entry['licence']}; {entry['size']}"
        for name, entry in listing.items()
    )
    return "\n".join(sets)
