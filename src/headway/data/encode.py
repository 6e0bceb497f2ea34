"""A corpus of text into a token file, in constant memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headway.data.reading import Piece, read_text
from headway.data.tokenfile import TokenFileWriter
from headway.errors import DataError
from headway.text import Tokenizer

_BATCH_PIECES, _BATCH_CHARACTERS = 512, 1 << 20


@dataclass(frozen=True)
class Corpus:
    """What was written: `text_bytes` are UTF-8 bytes, for bits per byte."""

    path: Path
    documents: int
    tokens: int
    text_bytes: int


def encode_corpus(
    source: str | Path | Iterable[str | Path] | Iterable[Piece],
    tokenizer: Tokenizer,
    path: str | Path,
    *,
    key: str = "text",
    bos: bool = True,
    eos: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Corpus:
    """Reads `source` (files, folders, or pieces), writes the token file `path`.

    Each document begins with BOS (if `bos` and the tokenizer does so) and ends with EOS (if `eos` and it has
    one). `progress(tokens, bytes)` is called after each batch. Memory does not grow with the corpus.
    """
    with TokenFileWriter(path, tokenizer.vocab_size, fingerprint=tokenizer.fingerprint) as out:
        begins = True
        for batch in _batches(_pieces(source, key)):
            encoded = tokenizer.encode_batch([piece.text for piece in batch], bos=False)
            for piece, ids in zip(batch, encoded, strict=True):
                if begins and bos and tokenizer.begins_with_bos and tokenizer.bos is not None:
                    out.extend([tokenizer.bos])
                out.extend(ids, text_bytes=len(piece.text.encode()))
                if piece.ends and eos and tokenizer.eos is not None:
                    out.extend([tokenizer.eos])
                if piece.ends:
                    out.end_document()
                begins = piece.ends
            if progress is not None:
                progress(out.count, out.text_bytes)
        if not out.text_bytes:
            raise DataError(f"{path}: no text; every document of the corpus is empty")
    return Corpus(Path(path), out.documents, out.count, out.text_bytes)


def _pieces(source: str | Path | Iterable[str | Path] | Iterable[Piece], key: str) -> Iterator[Piece]:
    if isinstance(source, (str, Path)):
        yield from read_text(source, key=key)
        return
    for one in source:
        yield from [one] if isinstance(one, Piece) else read_text(one, key=key)


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
