"""`headway data [NAME] [FILES ...]`: the data of the shipped recipes, from files that there are."""

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
    """Prepare the data that a shipped recipe names, from files that you have; nothing is downloaded. Without a name:
    the list of them, of what each is made, where that is to be had, its licence and its size.

    name: as the recipe has it, as text8.txt
    files: that it is made of, packed by gzip or not
    out: where it is written [default: NAME, here]
    """
    from headway.data.datasets import DATASETS, prepare

    if name is None:
        if out is not None:
            raise ConfigError("data: --out is of a set; give its NAME, too")
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
    """Three lines a set: what it is, what it is made of, and where that is to be had."""
    sets = (
        f"{name}: {entry['what']}\n  of {entry['files'] or entry['source']}\n"
        f"  {entry['source']}; {entry['licence']}; {entry['size']}"
        for name, entry in listing.items()
    )
    return "\n".join(sets)
