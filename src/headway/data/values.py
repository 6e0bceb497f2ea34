"""Reading the values of data files one by one, each with its place in the file.

| path | values |
|---|---|
| `x.jsonl` | one per line |
| `x.json` | the elements of an array; the questions of SQuAD's object; or one object per line |
| `x.csv`, `x.tsv` | one object per line; the first line names the columns. CSV is quoted, TSV is not |
| `x.conll` | one per sentence: one word per line, with its tag in the last column; an empty line ends the sentence |

Each file may be compressed (`x.json.gz`). Text is UTF-8. What cannot be read raises DataError with file and line.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any

from headway.errors import DataError, as_error, near_file

Value = tuple[str, Any]  # (place in the file, value)


def values(path: str | Path) -> Iterator[Value]:
    """Yields the values of a file, each with its `file:line` (inside a JSON value, `file: path`).

    Raises DataError for a file of another format, and for one without values."""
    file = existing(path)
    if suffix(file) not in READERS:
        raise DataError(
            f"{file}: records are read from {', '.join(READERS)} (or .gz of these), not {suffix(file)!r}"
        )
    seen = False
    for value in READERS[suffix(file)](file):
        seen = True
        yield value
    if not seen:
        raise DataError(f"{file}: no records")


def existing(path: str | Path) -> Path:
    """Returns the path of an existing file. Raises DataError if there is none."""
    file = Path(path)
    if not file.is_file():
        kind = "a folder; records are read from files" if file.is_dir() else "no such file"
        raise DataError(f"{file}: {kind}{near_file(file)}")
    return file


def suffix(file: Path) -> str:
    """Returns the suffix of a file name, ignoring .gz: that of `x.json.gz` is .json."""
    return Path(file.name.removesuffix(".gz")).suffix


def string(value: Mapping[str, Any], key: str) -> str:
    """Returns the string under a key. Raises DataError if it is no string; the caller adds the place of the value."""
    text = value[key]
    if not isinstance(text, str):
        raise DataError(f'"{key}" must be a string, got {type(text).__name__}')
    return text


@contextmanager
def opened(file: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """Opens a file for reading decompressed bytes. Raises DataError for an empty file and for broken gzip data."""
    if file.stat().st_size == 0:
        raise DataError(f"{file}: the file is empty")
    with (
        as_error(DataError, f"{file}: a broken gzip file", gzip.BadGzipFile, EOFError, zlib.error),
        gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as source,
    ):
        yield source


def checked(text: str, where: str) -> str:
    """Returns the text unchanged. Raises DataError for a NUL character and for lone surrogates."""
    if "\0" in text:
        line = text[: text.index("\0")].count("\n")
        raise DataError(
            f"{where}: a NUL character{f', {line} lines further on' if line else ''}: is this text?"
        )
    surrogate = next((c for c in text if 0xD800 <= ord(c) <= 0xDFFF), None) if not text.isascii() else None
    if surrogate is not None:
        raise DataError(f"{where}: a lone surrogate U+{ord(surrogate):04X}, which no UTF-8 text can hold")
    return text


def lines(file: Path) -> Iterator[tuple[str, str]]:
    """Yields the lines of a file without line ends, each with its `file:line`."""
    with opened(file) as source:
        for number, raw in enumerate(source, 1):
            where = f"{file}:{number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8 at byte {error.start} of the line") from None
            yield where, checked(line, where)


def _whole(file: Path) -> str:
    with opened(file) as source:
        try:
            return checked(source.read().decode("utf-8-sig"), str(file))
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: not UTF-8 at byte {error.start}") from None


def _jsonl(file: Path) -> Iterator[Value]:
    for where, line in lines(file):
        if not line.strip():
            continue
        if line.lstrip().startswith("["):
            raise DataError(
                f"{where}: the line begins a JSON array, but JSONL has one object per line; rename an array to .json"
            )
        yield where, _decoded(line, file, int(where.rpartition(":")[2]))


def _json(file: Path) -> Iterator[Value]:
    text = _whole(file)
    try:
        value = _decoded(text, file)
    except DataError as error:
        if text.lstrip().startswith("{") and "Extra data" in str(error):
            yield from _jsonl(file)
            return
        raise
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        yield from _squad(value["data"], str(file))
    elif isinstance(value, dict):
        yield f"{file}:1", value
    elif isinstance(value, list):
        yield from ((f"{file}: [{i}]", element) for i, element in enumerate(value))
    else:
        raise DataError(f"{file}: expected an object or an array of objects, got {text.strip()[:20]!r}")


def _squad(articles: list[Any], file: str) -> Iterator[Value]:
    """Yields the questions of SQuAD's articles, each with its context; elements that are no articles unchanged."""
    for a, article in enumerate(articles):
        where = f"{file}: data[{a}]"
        if not (isinstance(article, Mapping) and "paragraphs" in article):
            yield where, article
            continue
        for p, paragraph in enumerate(_list(article, "paragraphs", where)):
            inner = f"{where}.paragraphs[{p}]"
            for q, question in enumerate(_list(paragraph, "qas", inner)):
                if not isinstance(question, Mapping):
                    raise DataError(f"{inner}.qas[{q}]: an object is expected, got {type(question).__name__}")
                context = {k: paragraph[k] for k in ("context",) if k in paragraph}
                yield f"{inner}.qas[{q}]", {**question, **context}


def _list(value: Any, key: str, where: str) -> list[Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get(key), list):
        actual = sorted(value) if isinstance(value, Mapping) else type(value).__name__
        raise DataError(f'{where}: SQuAD has a list "{key}" here, got {actual}')
    return list(value[key])


def _table(file: Path) -> Iterator[Value]:
    quoted = suffix(file) == ".csv"
    source = io.StringIO(_whole(file), newline="")
    options: dict[str, Any] = {"strict": True} if quoted else {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    reader = csv.reader(source, **options)
    try:
        names = next(reader, [])
        begin = reader.line_num + 1
        for cells in reader:
            where, begin = f"{file}:{begin}", reader.line_num + 1
            if len(cells) not in (0, len(names)):
                raise DataError(f"{where}: {len(cells)} cells; the first line names {len(names)}: {names}")
            if cells:
                yield where, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{file}:{reader.line_num}: not {suffix(file)[1:].upper()}: {error}") from None


def _conll(file: Path) -> Iterator[Value]:
    """Yields sentences of CoNLL's format (Tjong Kim Sang and De Meulder 2003); -DOCSTART- lines are left out."""
    begin, rows = "", list[list[str]]()
    for where, line in chain(lines(file), [("", "")]):
        cells = line.split()
        if cells and cells[0] != "-DOCSTART-":
            if len(cells) < 2:
                raise DataError(f"{where}: a word and its tag are expected, got {line!r}")
            begin, rows = begin if rows else where, [*rows, cells]
        elif rows:
            yield begin, {"tokens": [row[0] for row in rows], "tags": [row[-1] for row in rows]}
            rows = []


def _decoded(text: str, file: Path, line: int = 1) -> Any:
    """Decodes a JSON text that begins at line `line` of a file. Raises DataError with the line of the error."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        raise DataError(
            f"{file}:{line + error.lineno - 1}: not JSON: {reason} at column {error.colno}"
        ) from None
    except (ValueError, RecursionError) as error:  # numbers and nestings beyond Python's limits
        raise DataError(f"{file}:{line}: JSON beyond Python's limits: {error}") from None


READERS = {".jsonl": _jsonl, ".json": _json, ".csv": _table, ".tsv": _table, ".conll": _conll}
