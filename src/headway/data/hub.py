"""Data sets of the Hugging Face Hub as local files.

| address | local file |
|---|---|
| `hf://owner/name[@revision]/path` | the file of a data set, unchanged; of a .parquet file, its rows as JSONL |
| `hf://owner/name[@revision][/config]:split` | the rows of a split, as JSONL |
| rows with `#column` | the rows as {"text": ...}, from this column |

Rows are streamed once (by `datasets`) into a file under HF_HOME. From then on they are a local file like any other, in
a fixed order, so that a run resumes exactly. An interrupted download continues after the rows that it has, from the
same commit.
"""

import json
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headway.checkpoints.remote import asking
from headway.errors import ConfigError, DataError, as_error
from headway.storage.appending import open_lines

SCHEME = "hf://"
_ADDRESS = re.compile(
    r"hf://(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[^/:#]+))?(/(?P<path>[^:#]+))?(:(?P<split>[^#]+))?(#(?P<column>.+))?"
)


Address = re.Match[str]
"""A parsed address; its groups are the parts of the table above: id, revision, path, split, column."""


def parse_address(text: str) -> Address:
    """Parses an `hf://` address. Raises DataError if it is malformed."""
    match = _ADDRESS.fullmatch(text)
    has_rows = match is not None and (match["split"] or (match["path"] or "").endswith(".parquet"))
    if match is None or not (match["split"] or match["path"]) or (match["column"] and not has_rows):
        raise DataError(
            f"{text}: not an address of Hub data; write hf://OWNER/NAME[@REVISION]/PATH for a file, "
            "hf://OWNER/NAME[@REVISION][/CONFIG]:SPLIT for rows, and append #COLUMN for one column of rows"
        )
    return match


def file_name(address: Address) -> str:
    """Returns the name of the JSONL file of an address's rows, below the folder of the data set."""
    parts = address.group("path", "split", "column")
    return ".".join(re.sub(r"[^\w.-]+", "-", part) for part in parts if part) + ".jsonl"


def is_remote(source: str | Path) -> bool:
    """Returns whether `source` is an `hf://` address."""
    return str(source).startswith(SCHEME)


def local(source: str | Path) -> Path:
    """Returns the local file of an `hf://` address, downloaded if necessary; any other path unchanged.

    Raises HubError if the Hub does not provide it, ConfigError for a missing package, DataError for a malformed address
    and for rows that JSON cannot represent."""
    if not is_remote(source):
        return Path(source)
    import huggingface_hub
    from huggingface_hub import constants

    address = parse_address(str(source))
    if address["split"] is None and not str(address["path"]).endswith(".parquet"):
        return _file(address, address["revision"])
    folder = Path(constants.HF_HOME) / "headway" / address["id"].replace("/", "--")
    target = folder / (address["revision"] or "main") / file_name(address)
    if not target.exists():
        with asking(address.string):
            info = huggingface_hub.HfApi().dataset_info(address["id"], revision=address["revision"])
        _stream(address, str(info.sha), target)
    return target


def _file(address: Address, revision: str | None) -> Path:
    import huggingface_hub

    with asking(address.string):
        return Path(
            huggingface_hub.hf_hub_download(
                address["id"], str(address["path"]), repo_type="dataset", revision=revision
            )
        )


def _stream(address: Address, commit: str, target: Path) -> None:
    """Downloads the rows of a commit into a hidden file beside `target`, continuing after the rows that it holds, and
    renames it to `target` when it is complete."""
    partial = target.with_name(f".{target.name}.{commit}")
    with open_lines(partial, f"{address.string} is being fetched by another process; wait for it") as file:
        done = sum(1 for _ in file)
        for number, row in enumerate(_rows(address, commit, done), done + 1):
            file.write(_line(address, row, number).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
        os.replace(partial, target)


def _rows(address: Address, commit: str, done: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of a split or of a .parquet file, without the first `done`."""
    if find_spec("datasets") is None:
        raise ConfigError(
            f'{address.string} needs datasets, which is not installed; pip install "headway[hub]"'
        )
    import datasets

    options: dict[str, Any] = {"path": address["id"], "name": address["path"], "revision": commit}
    if address["split"] is None:
        options = {"path": "parquet", "data_files": str(_file(address, commit))}
    with asking(address.string):
        stream = datasets.load_dataset(**options, split=address["split"] or "train", streaming=True)
        yield from stream.skip(done) if done else stream


def _line(address: Address, row: dict[str, Any], number: int) -> str:
    where, column = f"{address.string}, row {number}", address["column"]
    if column is not None:
        if not isinstance(row.get(column), str):
            problem = (
                f"{column!r} is {type(row[column]).__name__}"
                if column in row
                else f"its columns are {sorted(row)}"
            )
            raise DataError(f"{where}: #{column} must name a column of strings; {problem}")
        row = {"text": row[column]}
    with as_error(
        DataError, f"{where}: not JSON; choose a column of strings, {address.string}#COLUMN", TypeError
    ):
        return json.dumps(row, ensure_ascii=False)
