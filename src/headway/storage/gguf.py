"""GGUF files: header, metadata and tensor table, validated before any tensor value is read.

    4 bytes     "GGUF"
    u32         version: 2 or 3
    u64, u64    number of tensors, number of keys
    keys        each: string name, u32 kind, value
    tensors     each: string name, u32 axes, u64 sizes (the fastest first), u32 type, u64 offset
    padding     to a multiple of general.alignment (32 unless given)
    values      in the order of the table, each padded to the alignment

A string is a u64 length in bytes and UTF-8; an array is u32 kind, u64 number of items and the items. Numbers are
little-endian. (ggml-org/ggml, docs/gguf.md.) Memory is bounded by the length of header and metadata, which is at most
`LONGEST`, whatever the file claims.
"""

import mmap
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from headway.errors import CheckpointError
from headway.storage.gguf_blocks import BY_NUMBER, UNSUPPORTED, BlockType
from headway.storage.reading import open_regular, refuse_impostor
from headway.storage.safetensors import Entry, check_form

MAGIC = b"GGUF"
VERSIONS = (2, 3)
LONGEST = 256 << 20
"""Most bytes of header, metadata and tensor table that are read: room for vocabularies of millions of tokens."""
ALIGNMENT = "general.alignment"
USUAL_ALIGNMENT, LARGEST_ALIGNMENT = 32, 1 << 20
MOST_AXES = 4
BOOL, STRING, ARRAY = 7, 8, 9
NUMBERS: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    BOOL: "B",
    10: "Q",
    11: "q",
    12: "d",
}
"""Format codes of `struct` and `array`, by the kind of a value."""
COUNTS = struct.Struct("<QQ")

Value: TypeAlias = "bool | int | float | str | array[Any] | list[str]"
"""The value of a key; an array of booleans is an array of 0 and 1."""


@dataclass(frozen=True, kw_only=True)
class Packed(Entry):
    """One tensor in the table of a file: its bytes as an `Entry` (blocked rows as uint8), and how to interpret them.

    Attributes:
        type: how the numbers are stored.
        numbers: shape of the numbers, the slowest axis first.
    """

    type: BlockType
    numbers: tuple[int, ...]

    @property
    def stored_as(self) -> str:
        return self.type.name


@dataclass(frozen=True)
class GGUF:
    """The keys and tensor table of a GGUF file, both in the order of the file."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, Packed]


def is_gguf(path: Path) -> bool:
    """Returns whether a path is a file that begins with GGUF's magic bytes."""
    if not path.is_file():
        return False
    with open_regular(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf(path: str | Path) -> GGUF:
    """Returns the metadata and the tensor table of a file; no tensor value is read.

    Raises CheckpointError, naming file and fault, for a file that is not GGUF version 2 or 3 or is damaged: truncated,
    counts and lengths beyond its end, unknown or unsupported kinds and types, strings that are not UTF-8, repeated
    names, tensors that overlap, leave gaps or end outside of the file."""
    path = Path(path)
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        refuse_impostor(path, file.read(512), "a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(path, data, min(size, LONGEST), size)
            return reader.file()


class _Reader:
    """A sequential reader of a file's bytes; `end` is the limit of header and table."""

    def __init__(self, path: Path, data: mmap.mmap, end: int, size: int) -> None:
        self.path, self.data, self.end, self.size, self.at = path, data, end, size, 0

    def file(self) -> GGUF:
        if (magic := self.raw(4, "the first four bytes")) != MAGIC:
            raise CheckpointError(
                f"{self.path} is not a GGUF file: it begins with {magic!r}, not with {MAGIC!r}"
            )
        version = self.number("I", "the version")
        if version not in VERSIONS:
            hint = (
                " (its bytes are those of a big-endian machine)" if version & 0xFFFF == 0 and version else ""
            )
            raise CheckpointError(
                f"{self.path}: GGUF version {version}{hint} is unsupported; supported are versions 2 and 3, "
                "little-endian: convert the model again"
            )
        tensors, keys = COUNTS.unpack(self.raw(COUNTS.size, "the counts"))
        # a key takes at least 13 bytes, a tensor at least 32
        for count, smallest, kind in ((keys, 13, "keys"), (tensors, 32, "tensors")):
            if count > (self.end - self.at) // smallest:
                self.damaged(f"it claims {count:,} {kind}, which do not fit into its {self.size:,} bytes")
        metadata: dict[str, Value] = {}
        for _ in range(keys):
            name = self.name("a key")
            if name in metadata:
                self.damaged(f"the key {name} occurs twice")
            metadata[name] = self.value(self.number("I", f"the kind of {name}"), name)
        table = [self.tensor() for _ in range(tensors)]
        return GGUF(self.path, metadata, self.placed(table, self.alignment(metadata)))

    def raw(self, count: int, what: str) -> bytes:
        if count > self.end - self.at:
            if self.end < self.size:
                self.damaged(f"header and metadata have more than {LONGEST:,} bytes")
            raise CheckpointError(
                f"{self.path} is truncated or damaged: its {self.size:,} bytes end within {what} ({count:,} bytes from "
                f"byte {self.at:,}); download or copy it again"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.raw(struct.calcsize("<" + code), what))[0]

    def string(self, what: str) -> str:
        raw = self.raw(self.number("Q", f"the length of {what}"), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.damaged(f"{what} is not UTF-8: {error.reason} at byte {error.start:,} of it, {raw[:40]!r}")

    def name(self, what: str) -> str:
        name = self.string(f"the name of {what}")
        check_form(self.path, name, ())
        if not name:
            self.damaged(f"{what} has no name")
        return name

    def value(self, kind: int, name: str) -> Value:
        if kind == STRING:
            return self.string(name)
        if kind == ARRAY:
            return self.array(name)
        if kind not in NUMBERS:
            self.damaged(f"{name} is of kind {kind}, which is unknown")
        value: int | float = self.number(NUMBERS[kind], name)
        if kind == BOOL and value not in (0, 1):
            self.damaged(f"{name} must be true or false (1 or 0), got {value}")
        return bool(value) if kind == BOOL else value

    def array(self, name: str) -> "array[Any] | list[str]":
        kind, count = self.number("I", f"the kind of {name}"), self.number("Q", f"the length of {name}")
        item_bytes = 8 if kind == STRING else struct.calcsize("<" + NUMBERS.get(kind, "B"))
        if kind != STRING and kind not in NUMBERS:
            self.damaged(f"{name} is an array of kind {kind}, which is unknown or unsupported")
        if count > (self.end - self.at) // item_bytes:
            self.damaged(f"{name} claims {count:,} items, which do not fit into its {self.size:,} bytes")
        if kind == STRING:
            return [self.string(f"item {i} of {name}") for i in range(count)]
        return array(NUMBERS[kind], self.raw(count * item_bytes, name))

    def alignment(self, metadata: Mapping[str, Value]) -> int:
        value = metadata.get(ALIGNMENT, USUAL_ALIGNMENT)
        if type(value) is not int or not 8 <= value <= LARGEST_ALIGNMENT or value & (value - 1):
            self.damaged(
                f"{ALIGNMENT} must be a power of two from 8 to {LARGEST_ALIGNMENT:,}, got {str(value)[:80]}"
            )
        return value

    def tensor(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        name = self.name("a tensor")
        axes = self.number("I", f"the axes of {name}")
        if not 1 <= axes <= MOST_AXES:
            self.damaged(f"tensor {name} has {axes:,} axes; tensors have 1 to {MOST_AXES}")
        sizes = struct.unpack(f"<{axes}Q", self.raw(8 * axes, f"the sizes of {name}"))
        number, offset = struct.unpack("<IQ", self.raw(12, f"the place of {name}"))
        check_form(self.path, name, sizes)
        if number not in BY_NUMBER:
            known = ", ".join(kind.name for kind in BY_NUMBER.values())
            unknown = (
                f"{UNSUPPORTED[number]}, which is unsupported"
                if number in UNSUPPORTED
                else f"{number}, which is unknown"
            )
            raise CheckpointError(f"{self.path}: tensor {name} is of type {unknown}; supported are {known}")
        kind = BY_NUMBER[number]
        if 0 in sizes or sizes[0] % kind.block:
            self.damaged(
                f"tensor {name} has sizes {list(sizes)}: rows of {kind.name} hold multiples of {kind.block}"
            )
        return name, tuple(reversed(sizes)), kind, offset

    def placed(
        self, table: list[tuple[str, tuple[int, ...], BlockType, int]], alignment: int
    ) -> dict[str, Packed]:
        """Returns the tensors with their places in the file, which must follow each other without gaps."""
        begin = -(-self.at // alignment) * alignment  # the next multiple: byte 70, alignment 32 gives 96
        tensors: dict[str, Packed] = {}
        next_offset = end = 0
        for name, shape, kind, offset in table:
            if name in tensors:
                self.damaged(f"the tensor {name} occurs twice")
            if offset != next_offset:
                self.damaged(
                    f"tensor {name} is at byte {offset:,} of the values, but should be at {next_offset:,}"
                )
            raw = (*shape[:-1], shape[-1] // kind.block * kind.nbytes // kind.dtype.itemsize)
            tensors[name] = Packed(raw, kind.dtype, self.path, begin + next_offset, type=kind, numbers=shape)
            end = next_offset + tensors[name].nbytes
            next_offset = -(-end // alignment) * alignment
        if table and begin + end > self.size:
            raise CheckpointError(
                f"{self.path} is truncated: it has {self.size:,} of {begin + end:,} bytes; the download or copy was "
                "cut, repeat it"
            )
        if self.size > begin + next_offset:
            self.damaged(f"{self.size - begin - next_offset:,} bytes follow the last tensor")
        return tensors

    def damaged(self, fault: str) -> NoReturn:
        raise CheckpointError(f"{self.path} is damaged: {fault}; download or copy it again")
