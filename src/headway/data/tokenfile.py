"""Token files: the token ids of a corpus on disk, read through a memory map.

    bytes 0..127      header (see _HEADER), little endian
    then              count ids, uint16 if vocab <= 65536, else uint32
    then, 8-aligned   documents x uint64: where each document ends (exclusive, in tokens)

A file gets its name only when it is complete.
"""

import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import DataError

_MAGIC, _VERSION = b"HDWYTOKS", 1
# magic, version, bytes per id, vocab, count, documents, UTF-8 bytes of the text, fingerprint of the tokenizer
_HEADER = struct.Struct("<8sIIQQQQ32s")
_ROOM = 128
_NO_TOKENIZER = bytes(32)


class TokenFile:
    """A tokenized corpus on disk. Opening it reads the header only; ids are paged in as they are accessed.

    Attributes:
        tokens: all ids, document after document.  uint16 | uint32 [count]
        ends: where each document ends in `tokens`, exclusive.  uint64 [documents]
        vocab: all ids are below it.   text_bytes: UTF-8 bytes of the encoded text (0: unknown).
        fingerprint: of the tokenizer that made the ids (`Tokenizer.fingerprint`; 32 zero bytes: unknown).

    Raises DataError for a file that is no token file, is truncated, or has another version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise DataError(
                f"{path}: no such token file" + (" (it is a folder)" if self.path.is_dir() else "")
            )
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            header = file.read(_ROOM)
        if len(header) < _ROOM or not header.startswith(_MAGIC):
            raise DataError(
                f"{path}: not a token file of headway ({size} bytes, it begins with {header[:8]!r})"
            )
        _, version, width, vocab, count, documents, text, fingerprint = _HEADER.unpack_from(header)
        if version != _VERSION:
            raise DataError(f"{path}: token file version {version}; this headway reads version {_VERSION}")
        at = _aligned(_ROOM + count * width)
        if size != at + 8 * documents or not documents:
            raise DataError(
                f"{path}: {size} bytes, but its header says {count} tokens of {width} bytes in {documents} "
                f"documents, which is {at + 8 * documents}: the file is cut off or was changed"
            )
        self.vocab, self.text_bytes, self.fingerprint = vocab, text, fingerprint
        self.tokens = np.memmap(self.path, f"<u{width}", mode="r", offset=_ROOM, shape=(count,))
        self.ends = np.memmap(self.path, "<u8", mode="r", offset=at, shape=(documents,))

    def described(self) -> dict[str, Any]:
        """Returns the counts and the tokenizer's fingerprint, which identify this file's content."""
        return {
            "tokens": len(self),
            "documents": self.documents,
            "text_bytes": self.text_bytes,
            "tokenizer": self.fingerprint.hex()[:16],
        }

    def __len__(self) -> int:
        """Returns the number of tokens in the file."""
        return len(self.tokens)

    @property
    def documents(self) -> int:
        return len(self.ends)

    def document(self, i: int) -> NDArray[Any]:
        """Returns the ids of document i (a view of the memory map)."""
        if not 0 <= i < self.documents:
            raise DataError(
                f"{self.path}: there is no document {i}; documents are numbered from 0 to {self.documents - 1}"
            )
        begin = int(self.ends[i - 1]) if i else 0
        return self.tokens[begin : int(self.ends[i])]

    def require_tokenizer(self, fingerprint: bytes) -> None:
        """Raises DataError if the ids were made by another tokenizer."""
        if self.fingerprint not in (fingerprint, _NO_TOKENIZER):
            raise DataError(
                f"{self.path}: these tokens were made by another tokenizer ({self.fingerprint.hex()[:12]}) than the "
                f"one given ({fingerprint.hex()[:12]}); encode the text again"
            )


class TokenFileWriter:
    """Writer of a token file, document by document, in constant memory.

    Use as a context manager: the file gets its name when the block ends, and is removed if the block fails.
    """

    def __init__(self, path: str | Path, vocab: int, *, fingerprint: bytes = _NO_TOKENIZER) -> None:
        if not 1 <= vocab <= 1 << 32:
            raise DataError(f"token file: vocab must lie in 1..2**32, got {vocab}")
        self.path = Path(path)
        if self.path.is_dir():
            raise DataError(f"{path}: this is a folder; a token file needs a file name")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.vocab, self.fingerprint = vocab, fingerprint
        self.dtype = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
        self.count = self.documents = self.text_bytes = self._last_end = 0
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        self._file, self._temporary = os.fdopen(handle, "wb"), Path(name)
        self._ends = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115
        self._file.write(bytes(_ROOM))

    def extend(self, ids: Sequence[int] | NDArray[Any], *, text_bytes: int = 0) -> None:
        """Adds ids to the current document; `text_bytes` is the number of UTF-8 bytes of their text."""
        values = np.asarray(ids, dtype=np.int64)
        outside = values[(values < 0) | (values >= self.vocab)]
        if outside.size:
            raise DataError(
                f"{self.path}: token id {outside[0]} in document {self.documents} is outside the vocabulary of "
                f"{self.vocab}"
            )
        with self._naming():
            self._file.write(values.astype(self.dtype).tobytes())
        self.count += values.size
        self.text_bytes += text_bytes

    def end_document(self) -> None:
        """Ends the current document; a document without ids is not recorded."""
        if self.count > self._last_end:
            self._ends.write(struct.pack("<Q", self.count))
            self._last_end = self.count
            self.documents += 1

    def add(self, ids: Sequence[int] | NDArray[Any], *, text_bytes: int = 0) -> None:
        """Adds one whole document."""
        self.extend(ids, text_bytes=text_bytes)
        self.end_document()

    def __enter__(self) -> "TokenFileWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                with self._naming():
                    self._finish()
        finally:
            self._temporary.unlink(missing_ok=True)
            for file in (self._file, self._ends):
                with suppress(OSError):  # the disk is full again: what was not written is not needed
                    file.close()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Raises an OSError inside the block as DataError with the file's name."""
        try:
            yield
        except OSError as error:
            raise DataError(f"{self.path}: could not be written: {error.strerror or error}") from error

    def _finish(self) -> None:
        """Ends the last document, writes the header, and renames the file to its final name."""
        self.end_document()
        if not self.count:
            raise DataError(f"{self.path}: no tokens; the corpus is empty")
        self._file.write(bytes(_aligned(self._file.tell()) - self._file.tell()))
        self._ends.seek(0)
        shutil.copyfileobj(self._ends, self._file)
        self._file.seek(0)
        head = (_MAGIC, _VERSION, self.dtype.itemsize, self.vocab, self.count, self.documents)
        self._file.write(_HEADER.pack(*head, self.text_bytes, self.fingerprint))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._temporary.replace(self.path)


def _aligned(offset: int) -> int:
    return (offset + 7) // 8 * 8
