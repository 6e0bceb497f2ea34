"""Writes GGUF files: metadata, table of tensors and values, tensor by tensor."""

import struct
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.errors import CheckpointError, as_error
from headway.storage.files import Put, atomic_write
from headway.storage.gguf import ARRAY, BOOL, COUNTS, MAGIC, STRING, USUAL_ALIGNMENT
from headway.storage.gguf_blocks import BlockType, quantize
from headway.storage.lazy import lazy

VERSION = 3
KINDS: Mapping[type, tuple[int, str]] = {bool: (BOOL, "?"), int: (4, "I"), float: (6, "f"), str: (STRING, "")}
LISTS: Mapping[type, tuple[int, str]] = {bool: (BOOL, "?"), int: (5, "i"), float: (6, "f"), str: (STRING, "")}
"""Kind and `struct` code of a value, and of the items of a list."""
LONGEST_NAME = 63  # GGML_MAX_NAME is 64, with the terminating zero
PIECE = 4 << 20  # number of values that are quantized at once


def write_gguf(
    path: str | Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    types: Mapping[str, BlockType],
    *,
    check: Callable[[Path], object] = lambda path: None,
) -> None:
    """Writes one file atomically, with each tensor quantized to its type when it is written, so that memory holds no
    second copy of all tensors. Tensors of uint8 are rows of blocks already.

    Metadata values are booleans, integers (u32; i32 in lists), floats (f32), strings and lists of one of these.
    `check` is called with the finished file before it is renamed; if it raises, `path` is unchanged. Raises
    CheckpointError for values and names that a file cannot hold, and as `quantize` does."""
    forms = lazy(tensors).forms
    head = [MAGIC, struct.pack("<I", VERSION), COUNTS.pack(len(forms), len(metadata))]
    head += [_string(key) + _value(key, value) for key, value in metadata.items()]
    offset, padding = 0, {}
    for name, form in forms.items():
        if len(name.encode()) > LONGEST_NAME:
            raise CheckpointError(
                f"tensor name {name} has {len(name.encode())} bytes; GGUF allows at most {LONGEST_NAME}"
            )
        kind, (*rows, last) = types[name], form.shape
        if form.dtype == torch.uint8:
            last = last // kind.nbytes * kind.block
        # number of axes, their sizes from the fastest, type, and offset of the values
        sizes = (last, *reversed(rows))
        head.append(
            _string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind.number, offset)
        )
        nbytes = prod(sizes) // kind.block * kind.nbytes
        padding[name] = -nbytes % USUAL_ALIGNMENT  # e.g. 24 bytes after 40, if aligned to 32
        offset += nbytes + padding[name]
    begin = b"".join(head)

    def put_all(put: Put) -> None:
        put(begin + bytes(-len(begin) % USUAL_ALIGNMENT))
        for name in forms:
            value = tensors[name].detach().cpu()
            rows = value.reshape(-1, value.shape[-1])
            for part in rows.split(max(1, PIECE // value.shape[-1])):
                packed = part if part.dtype == torch.uint8 else quantize(part, types[name])
                put(memoryview(packed.contiguous().reshape(-1).view(torch.uint8).numpy().data))
            put(bytes(padding[name]))

    atomic_write(path, put_all, check=check)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: Any) -> bytes:
    """Returns the kind and the bytes of a value."""
    if isinstance(value, list):
        kinds = {type(item) for item in value}
        if len(kinds) != 1 or not kinds <= LISTS.keys():
            raise CheckpointError(
                f"{key} must be a list of texts, whole numbers or floats, got {str(value)[:80]}"
            )
        kind, code = LISTS[kinds.pop()]
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + _items(key, code, value)
    if type(value) not in KINDS:
        raise CheckpointError(
            f"{key} must be true or false, a number, text, or a list of these, got {str(value)[:80]}"
        )
    kind, code = KINDS[type(value)]
    return struct.pack("<I", kind) + _items(key, code, [value])


def _items(key: str, code: str, values: list[Any]) -> bytes:
    """Returns the bytes of strings (whose code is empty) or of numbers."""
    fault = f"{key} has a number that 32 bits do not hold"
    with as_error(CheckpointError, fault, struct.error, OverflowError):
        return struct.pack(f"<{len(values)}{code}", *values) if code else b"".join(map(_string, values))
