"""Reading text files as a stream of documents, with errors that name file and line; and encoding them as a token file.

| path | documents |
|---|---|
| `x.jsonl`, `x.json`, `x.csv`, `x.tsv` | one per record (`headway.data.values`): the string under `key` ("text") |
| `x.md`, `x.html`, `x.pdf`, ... | refused: their source differs from the text that a reader sees |
| `x.txt`, and any other name | the whole file is one document |
| a folder | the files below it that end in .txt or .jsonl (or .gz of these), sorted by path |
| `hf://...` | a file or rows of the Hugging Face Hub: see `headway.data.hub` |

Each file may be compressed (`x.txt.gz`). Text is UTF-8. A byte order mark at the very beginning is dropped; line ends
are kept. NUL characters, bytes that are not UTF-8, lone surrogates and empty files raise DataError.
"""

import codecs
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from headway.data.hub import is_remote, local
from headway.data.tokenfile import TokenFile, TokenFileWriter
from headway.data.values import READERS, checked, opened, string, suffix, values
from headway.errors import DataError, as_error, check_known, near_file
from headway.text import Tokenizer

PIECE = 1 << 16  # bytes of a long file that are read at a time
_BATCH_PIECES, _BATCH_CHARACTERS = 512, 1 << 20
_SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")
_FORMATTED = {
    ".md": "Markdown", ".rst": "reStructuredText", ".html": "HTML", ".htm": "HTML", ".xml": "XML", ".tex": "TeX",
    ".pdf": "PDF", ".docx": "a Word document", ".epub": "an e-book", ".ipynb": "a notebook",
    ".parquet": "Parquet", ".arrow": "Arrow", ".zip": "an archive", ".tar": "an archive", ".tgz": "an archive",
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """Part of a document: its `text`, whether it is the document's last part, and its place (`file:line`)."""

    text: str
    ends: bool
    where: str


def read_text(
    paths: str | Path | Iterable[str | Path | Piece], *, key: str = "text", piece: int = PIECE
) -> Iterator[Piece]:
    """Yields the documents of files and folders, in pieces of about `piece` bytes, so that memory does not grow with
    the corpus. Pieces among `paths` are passed on.

    A long document is cut at a line end whose next line does not begin with white space, so that byte-level tokenizers
    give the same ids as for the whole document.
    """
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        if isinstance(path, Piece):
            yield path
            continue
        for file in _files(local(path)):
            yield from _records(file, key) if suffix(file) in READERS else _whole(file, piece)


def texts(paths: str | Path | Iterable[str | Path], *, key: str = "text") -> Iterator[str]:
    """Yields the pieces of `read_text` as plain strings, for training a tokenizer."""
    return (piece.text for piece in read_text(paths, key=key))


def encode_corpus(
    source: str | Path | Iterable[str | Path | Piece],
    tokenizer: Tokenizer,
    path: str | Path,
    *,
    key: str = "text",
    bos: bool = True,
    eos: bool = True,
) -> TokenFile:
    """Encodes `source` (files, folders, or pieces) into the token file `path`, and opens it.

    Each document begins with BOS if `bos` is set and the tokenizer begins texts with it, and ends with EOS if `eos` is
    set and the tokenizer has one. Memory does not grow with the corpus.

    Raises DataError if every document is empty, and as `read_text` and `TokenFileWriter`.
    """
    before = [tokenizer.bos] if bos and tokenizer.begins_with_bos and tokenizer.bos is not None else []
    after = [tokenizer.eos] if eos and tokenizer.eos is not None else []
    with TokenFileWriter(path, tokenizer.vocab_size, fingerprint=tokenizer.fingerprint) as out:
        begins = True
        for batch in _batches(read_text(source, key=key)):
            encoded = tokenizer.encode_batch([piece.text for piece in batch], bos=False)
            for piece, ids in zip(batch, encoded, strict=True):
                out.extend([*(before if begins else ()), *ids], text_bytes=len(piece.text.encode()))
                begins = piece.ends
                if piece.ends:
                    out.add(after)
        if not out.text_bytes:
            raise DataError(f"{path}: no text; every document of the corpus is empty")
    return TokenFile(path)


def digest(source: str | Path) -> str:
    """Returns a hash of the text of a file or folder, over the names and bytes of its files; of an hf:// address, whose
    text is taken to be fixed, over the address itself."""
    state = hashlib.blake2b(digest_size=16)
    if is_remote(source):
        state.update(str(source).encode())
        return state.hexdigest()
    for file in _files(Path(source)):
        with file.open("rb") as content:
            file_digest = hashlib.file_digest(content, hashlib.blake2b).digest()
        state.update(file.name.encode("utf-8", "surrogateescape") + b"\0" + file_digest)
    return state.hexdigest()


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if len(batch) >= _BATCH_PIECES or size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(_SUFFIXES))
        if not files:
            listing = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
            raise DataError(f"{path}: no .txt or .jsonl file in this folder (it holds: {listing})")
        return files
    if not path.exists():
        raise DataError(f"{path}: no such file or folder{near_file(path)}")
    if (form := _FORMATTED.get(suffix(path))) is not None:
        raise DataError(
            f"{path}: this file is {form}, which is not read as text; convert it to .txt, or to .jsonl with a "
            '"text" on each line; to use the markup itself as text, rename it to .txt'
        )
    return [path]


def _records(file: Path, key: str) -> Iterator[Piece]:
    """Yields the string under `key` of each record of a file as a document."""
    for where, value in values(file):
        if not isinstance(value, dict):
            raise DataError(f'{where}: an object with "{key}" is expected, got {type(value).__name__}')
        check_known(key, value, f"{where}: no key", are="this object has", error=DataError)
        with as_error(DataError, where):
            text = string(value, key)
        yield Piece(checked(text, where), True, where)


def _whole(file: Path, piece: int) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    buffer, line, offset, first = "", 1, 0, True
    with opened(file) as source:
        for raw in chain(iter(lambda: source.read(piece), b""), [b""]):
            try:
                buffer += decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                near = f"near byte {offset + error.start}; is this text?"
                where = near if raw else "at its end: the last character is cut off"
                raise DataError(f"{file}: not UTF-8 {where}") from None
            offset += len(raw)
            cut = _cut(buffer, 16 * piece) if len(buffer) > piece and raw else 0
            if cut:
                where = f"{file}:{line}"
                yield Piece(checked(buffer[:cut], where), False, where)
                line, buffer, first = line + buffer.count("\n", 0, cut), buffer[cut:], False
    if first and not buffer:
        raise DataError(f"{file}: the file is empty")
    where = f"{file}:{line}"
    yield Piece(checked(buffer, where), True, where)


def _cut(text: str, most: int) -> int:
    """Returns where to cut: after the last line end that is followed by something other than white space; 0 if there is
    no such place yet, and the end of the text if it is longer than `most` characters."""
    end = len(text)
    while (end := text.rfind("\n", 0, end)) >= 0:
        if end + 1 < len(text) and not text[end + 1].isspace():
            return end + 1
    return len(text) if len(text) > most else 0
