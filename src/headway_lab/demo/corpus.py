"""The demo's text, Python's own standard library, and its size under compressors."""

import gzip
import lzma
import math
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headway.errors import DataError

# Left out of the training text and the held-out text alike: tests (they repeat what they test), encodings and help
# texts (tables), third-party packages, files generated for one machine.
LEFT_OUT = frozenset(
    ("test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages",
     "lib-dynload", "__pycache__", "turtledemo")
)  # fmt: skip
HELD_OUT_SHARE = 16  # one in 16 top-level names
LEAST_BYTES = 20_000


@dataclass(frozen=True)
class Document:
    """One file: `name`, its path below the corpus root; `group`, the part of the name by which documents are held out;
    its text."""

    name: str
    group: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Training documents and held-out documents; `source` says where they come from, `rule` how they were split."""

    source: str
    rule: str
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]

    @property
    def train_bytes(self) -> int:
        return sum(len(document.text.encode()) for document in self.train)

    @property
    def held_out_bytes(self) -> bytes:
        """The held-out text as one stream, one document after the other."""
        return b"".join(document.text.encode() for document in self.held_out)


def standard_library(root: Path | None = None) -> Corpus:
    """Returns the Python files of the standard library. A top-level package or module is held out as a whole, by a hash
    of its name: no file of a held-out package is ever trained on, and the split depends only on names.

    Raises DataError if the standard library does not exist as files."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    documents = list(_files(root))
    train, held = (tuple(d for d in documents if is_held_out(d.group) is wanted) for wanted in (False, True))
    total = sum(len(document.text.encode()) for document in documents)
    if total < LEAST_BYTES or not held:
        raise DataError(
            f"{root}: {total} bytes in {len(documents)} files, {len(held)} of them held out, are too few; run with a "
            "Python whose standard library is installed as source files"
        )
    return Corpus(str(root), "held out by top-level package, tests and encodings left out", train, held)


def is_held_out(group: str) -> bool:
    """Returns whether a group is held out: a pure function of its name, so that the split is the same on every machine
    and for every Python."""
    return zlib.crc32(group.encode()) % HELD_OUT_SHARE == 5


def _left_out(name: Path) -> bool:
    return any(part in LEFT_OUT or part.startswith(("_sysconfigdata", "config-")) for part in name.parts)


def _files(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _left_out(name):
            continue
        try:
            text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        except (UnicodeDecodeError, OSError):
            continue
        if text:
            yield Document(name.as_posix(), name.parts[0].removesuffix(".py"), text)


def unigram_bits(data: bytes) -> float:
    """Returns the entropy of single bytes, in bits per byte: a lower bound for every code of single bytes on this
    text."""
    return -sum(n / len(data) * math.log2(n / len(data)) for n in Counter(data).values())


def gzip_bits(data: bytes) -> float:
    """Returns the bits per byte of `gzip -9` over the whole text as one stream, header included."""
    return 8 * len(gzip.compress(data, 9, mtime=0)) / len(data)


def xz_bits(data: bytes) -> float:
    """Returns the bits per byte of `xz -9e` over the whole text as one stream, header included."""
    return 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)
