"""Safetensors files: the header is validated against the file's size before a value is read; files are written tensor
by tensor.

    8 bytes    N, little-endian
    N bytes    JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {...}}
    values     one after another, without gaps

(huggingface/safetensors, README, "Format".) Memory is bounded by the length of the header, which is at most `LONGEST`,
whatever the file claims.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from headway.errors import CheckpointError, check_known
from headway.storage import disk
from headway.storage.dtypes import dtype_name
from headway.storage.files import Put, write_file
from headway.storage.lazy import Form, lazy
from headway.storage.reading import open_regular, parse_json, refuse_impostor

LONGEST = 32 << 20
"""Most bytes of a header that is read: room for about 200,000 tensors."""
LARGEST = 2**63
AXES = 64
LONGEST_NAME = 500
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Entry(Form):
    """One tensor in the header of a file: its form, and the offset of its values, in row-major order.

    `value` is the tensor itself, for the rare file that cannot be mapped."""

    file: Path
    at: int
    value: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def stored_as(self) -> str:
        """How its numbers are stored, for reports."""
        return dtype_name(self.dtype)


def read_described(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Returns the tensors of a safetensors file, in the order of its header, and the header's metadata.

    Raises CheckpointError, naming file and fault, for a file that is not a safetensors file, is truncated or too long,
    or whose header is too long, not JSON, names a tensor twice, or gives spans that leave gaps, overlap or do not fit
    their shapes.
    """
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(512)
        refuse_impostor(path, head, "a safetensors file")
        length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
        if head[8:9] == b"{" and length > LONGEST:
            _damaged(path, f"it claims {length:,} bytes, above the limit of {LONGEST:,}")
        if len(head) <= 8 or (head[8:9] == b"{" and length > size - 8):
            raise CheckpointError(f"{path} is truncated: {size:,} bytes end within its header; copy it again")
        if head[8:9] != b"{":
            raise CheckpointError(f"{path} is not a safetensors file: it begins with {head[:16]!r}")
        file.seek(8)
        raw = file.read(length)
    try:
        header = parse_json(raw)
    except ValueError as error:
        _damaged(path, str(error))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _damaged(path, "__metadata__ must map names to text")
    spans = {name: _span(path, name, entry) for name, entry in header.items()}
    expected_begin = 0
    for name, (form, begin, end) in sorted(spans.items(), key=lambda item: item[1][1:]):
        if begin != expected_begin or end - begin != form.nbytes:
            fault = (
                "does not fit its shape"
                if begin == expected_begin
                else "leaves a gap"
                if begin > expected_begin
                else "overlaps another"
            )
            _damaged(path, f"the span of {name}, {begin:,} to {end:,}, {fault}")
        expected_begin = end
    expected_size = 8 + length + expected_begin
    if size < expected_size:
        raise CheckpointError(
            f"{path} is truncated: it has {size:,} of {expected_size:,} bytes; "
            "the download or copy was cut, repeat it"
        )
    if size > expected_size:
        raise CheckpointError(f"{path} is damaged: {size - expected_size:,} bytes follow the last tensor")
    entries = {
        name: Entry(form.shape, form.dtype, path, 8 + length + begin)
        for name, (form, begin, _) in spans.items()
    }
    return entries, metadata


def check_form(path: Path, name: str, shape: tuple[int, ...]) -> None:
    """Raises CheckpointError for a name that is too long or not printable, and for an impossible shape."""
    if not name.isprintable() or len(name) > LONGEST_NAME:
        fault = (
            f"the tensor name {name[:80]!r} ({len(name):,} characters) is unprintable or over {LONGEST_NAME}"
        )
    elif len(shape) > AXES or prod(max(n, 1) for n in shape) * 8 >= LARGEST:
        fault = f"tensor {name} has {len(shape)} axes of {str(shape)[:80]}: no tensor is that large"
    else:
        return
    raise CheckpointError(f"{path} is damaged: {fault}; copy or download it again")


def _span(path: Path, name: str, entry: Any) -> tuple[Form, int, int]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _damaged(path, f"{name[:80]!r} must have dtype, shape and data_offsets, got {str(entry)[:80]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    for key, numbers in (("shape", shape), ("data_offsets", offsets)):
        valid = isinstance(numbers, list) and all(type(n) is int and 0 <= n < LARGEST for n in numbers)
        if not valid or (key == "data_offsets" and len(numbers) != 2):
            expected = "two whole numbers" if key == "data_offsets" else "whole numbers"
            _damaged(
                path,
                f"{key} of {name[:80]!r} must be {expected} from 0 to below 2^63, got {str(numbers)[:80]}",
            )
    check_known(
        str(dtype)[:80], DTYPES, f"{path}: tensor {name[:80]!r}: there is no dtype", error=CheckpointError
    )
    check_form(path, name, tuple(shape))
    return Form(tuple(shape), DTYPES[dtype]), offsets[0], offsets[1]


def _damaged(path: Path, fault: str) -> NoReturn:
    raise CheckpointError(f"{path} has a damaged safetensors header: {fault}; copy or download it again")


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a new safetensors file tensor by tensor, without a second copy of all tensors in memory.

    Equal tensors in equal order give an identical file. The widest dtypes come first, so that every value is aligned.
    """
    forms, names = lazy(tensors).forms, {dtype: name for name, dtype in DTYPES.items()}
    order = sorted(forms, key=lambda name: -forms[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    begin = 0
    for name in order:
        form = forms[name]
        if form.dtype not in names:
            raise CheckpointError(
                f"tensor {name} has dtype {form.dtype}, which safetensors files cannot store"
            )
        end = begin + form.nbytes
        header[name] = {"dtype": names[form.dtype], "shape": list(form.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)

    def put_all(put: Put) -> None:
        put(struct.pack("<Q", len(text)) + text)
        for name in order:
            put(_bytes(tensors[name]))

    write_file(path, put_all)


def _bytes(tensor: Tensor) -> disk.Buffer:
    if tensor.numel() == 0:
        return b""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
