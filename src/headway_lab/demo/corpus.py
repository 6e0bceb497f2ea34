"""The demo's text: Python's own standard library, or what the user gives; and what compressors make of it."""

import gzip
import lzma
import math
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headway.errors import DataError

# Left out: tests (they repeat what they test), encodings and help texts (tables), other people's packages, files
# made for one machine. From the training text and the held-out text alike.
LEFT_OUT = frozenset(
    ("test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages",
     "lib-dynload", "__pycache__", "turtledemo")
)  # fmt: skip
HELD_OUT_SHARE = 16  # one in 16 top-level names
LEAST_BYTES = 20_000


@dataclass(frozen=True)
class Document:
    """One file: `name` below the corpus, `group` the part of the name by which documents are held out, its text."""

    name: str
    group: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents held out; `source` says where they are from, `rule` how they were split."""

    source: str
    rule: str
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]

    @property
    def train_bytes(self) -> int:
        return sum(len(document.text.encode()) for document in self.train)

    @property
    def held_out_bytes(self) -> bytes:
        """The held-out text as one stream, documents one after the other."""
        return b"".join(document.text.encode() for document in self.held_out)


def standard_library(root: Path | None = None) -> Corpus:
    """The Python files of the standard library. A top-level package or module is held out as a whole, by a hash of its
    name: no file of a held-out package is ever trained on, and the split depends on nothing but the names."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    documents = list(_files(root, "*.py", _left_out))
    return _split(str(root), documents, "by top-level package, tests and encodings left out")


def own_text(path: Path) -> Corpus:
    """A text file, whose last tenth is held out, or a folder of text files, held out by a hash of their
    names.

    Raises DataError when there is nothing readable or too little."""
    if path.is_dir():
        documents = [d for suffix in ("*.txt", "*.md", "*.py", "*.rst") for d in _files(path, suffix)]
        return _split(str(path), sorted(documents, key=lambda d: d.name), "by top-level name")
    if not path.is_file():
        raise DataError(f"--data {path}: no such file or folder; give a text file or a folder of .txt files")
    text = _read(path)
    if text is None:
        raise DataError(f"--data {path}: not UTF-8 text; convert it first (iconv -f ... -t utf-8)")
    if len(text.encode()) < LEAST_BYTES:
        raise DataError(f"--data {path}: {len(text.encode())} bytes are too few; give {LEAST_BYTES} or more")
    cut = text.find("\n", len(text) * 9 // 10) + 1 or len(text) * 9 // 10
    train, rest = Document(path.name, "", text[:cut]), Document(path.name, "", text[cut:])
    return Corpus(str(path), "the last tenth is held out", (train,), (rest,))


def _split(source: str, documents: list[Document], how: str) -> Corpus:
    total = sum(len(document.text.encode()) for document in documents)
    if total < LEAST_BYTES:
        raise DataError(f"{source}: {total} bytes in {len(documents)} files are too few; give {LEAST_BYTES}")
    groups = {document.group for document in documents}
    held = {group for group in groups if is_held_out(group)}
    if held in (set(), groups):  # a handful of files, none or all of which the hash selects
        held = {documents[-1].group}
    if held == groups:
        raise DataError(f"{source}: all files share a top-level name, so none can be held out; give one file")
    train, rest = (tuple(d for d in documents if (d.group in held) is out) for out in (False, True))
    return Corpus(source, f"held out {how}", train, rest)


def is_held_out(group: str) -> bool:
    """A pure function of the name, so that the split is the same on every machine and for every Python."""
    return zlib.crc32(group.encode()) % HELD_OUT_SHARE == 5


def _left_out(name: Path) -> bool:
    return any(part in LEFT_OUT or part.startswith(("_sysconfigdata", "config-")) for part in name.parts)


def _files(
    root: Path, pattern: str, left_out: Callable[[Path], bool] = lambda _: False
) -> Iterator[Document]:
    for path in sorted(root.rglob(pattern)):
        name = path.relative_to(root)
        if left_out(name) or not path.is_file():
            continue
        text = _read(path)
        if text:
            yield Document(name.as_posix(), name.parts[0].removesuffix(".py"), text)


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except (UnicodeDecodeError, OSError):
        return None


def unigram_bits(data: bytes) -> float:
    """Entropy of the bytes one by one, in bits per byte: what no code for single bytes can beat on this text."""
    return -sum(n / len(data) * math.log2(n / len(data)) for n in Counter(data).values())


def gzip_bits(data: bytes) -> float:
    """Bits per byte of `gzip -9` over the whole text as one stream, header included."""
    return 8 * len(gzip.compress(data, 9, mtime=0)) / len(data)


def xz_bits(data: bytes) -> float:
    """Bits per byte of `xz -9e` over the whole text as one stream, header included."""
    return 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)
