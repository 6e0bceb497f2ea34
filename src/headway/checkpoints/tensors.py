"""Tensors on disk: safetensors files, shards with an index, and (when asked for) torch pickles; read lazily.

    tensors = open_tensors(folder_or_file)      # a Mapping: names and shapes known, values read when asked

The header of every file is checked against the size of the file before a value is read, so a truncated
file, a git-lfs pointer, an HTML page or a pickle is named as what it is.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from headway.checkpoints.files import read_json, refuse_impostor
from headway.errors import CheckpointError, did_you_mean

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
DTYPES = MappingProxyType(
    {
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
)


@dataclass(frozen=True)
class Entry:
    """What a header says of one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Tensors(Mapping[str, Tensor]):
    """Named tensors of one checkpoint. Names, shapes and dtypes are known; a value is mapped from disk when
    asked for."""

    def __init__(
        self,
        entries: Mapping[str, Entry],
        loaded: Mapping[str, Tensor] | None = None,
        stored_as: Mapping[str, str] | None = None,
    ) -> None:
        self.entries = MappingProxyType(dict(entries))
        self._loaded = dict(loaded or {})
        self._stored_as = dict(stored_as or {})
        self._open: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.entries:
            raise CheckpointError(f"there is no tensor {name!r}{did_you_mean(name, self.entries)}")
        file, stored = self.entries[name].file, self._stored_as.get(name, name)
        if stored in self._loaded:
            return self._loaded[stored]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt", device="cpu")
        value: Tensor = self._open[file].get_tensor(stored)
        return value

    def under(self, names: Mapping[str, str]) -> Tensors:
        """The same values under other names: {new name: name here}. Names that are not listed are left
        out."""
        stored = {new: self._stored_as.get(old, old) for new, old in names.items()}
        return Tensors({new: self.entries[old] for new, old in names.items()}, self._loaded, stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all values together."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the values lie in."""
        return tuple(dict.fromkeys(entry.file for entry in self.entries.values()))

    @property
    def dtypes(self) -> dict[torch.dtype, int]:
        """How many tensors there are of each dtype, the most frequent first."""
        found = [entry.dtype for entry in self.entries.values()]
        return {d: found.count(d) for d in sorted(set(found), key=lambda d: (-found.count(d), str(d)))}


def open_tensors(path: str | Path, *, allow_pickle: bool = False) -> Tensors:
    """The tensors of a folder or of one file (`.safetensors`, an index, or a pickle when `allow_pickle`).

    Raises CheckpointError for a file that is missing, truncated, empty, a git-lfs pointer, an HTML page or
    a pickle; for an index that names a missing file or disagrees with its shards; and for a folder with no
    weights, or two sets.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"there is no file or folder {path}")
    if path.is_dir():
        path = _weights_of(path, allow_pickle)
    if path.name.endswith(".index.json"):
        return _open_shards(path, allow_pickle)
    return _open_file(path, allow_pickle)


def _weights_of(folder: Path, allow_pickle: bool) -> Path:
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        raise CheckpointError(
            f"{folder} holds two sets of weights, {SINGLE} and {INDEX}: remove the one that is out of date"
        )
    if index.exists() or single.exists():
        return index if index.exists() else single
    pickled = [folder / name for name in PICKLES if (folder / name).exists()]
    if pickled and allow_pickle:
        return pickled[-1]
    if pickled:
        raise _pickle_refused(pickled[0])
    shards = sorted(p.name for p in folder.glob("model-*-of-*.safetensors"))
    if shards:
        raise CheckpointError(
            f"{folder} holds shards ({shards[0]}, ...) but no {INDEX}: the copy is incomplete"
        )
    there = ", ".join(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"
    raise CheckpointError(f"{folder} holds no weights: expected {SINGLE} or {INDEX}, found {there}")


def _open_file(path: Path, allow_pickle: bool) -> Tensors:
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; a file of weights is expected under that name")
    if _looks_pickled(path):
        if not allow_pickle:
            raise _pickle_refused(path)
        return _open_pickle(path)
    return Tensors(_header(path))


def _open_shards(index: Path, allow_pickle: bool) -> Tensors:
    folder, listed = index.parent, read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(v, str) for v in listed.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to file names")
    files = sorted(set(listed.values()))
    if outside := [f for f in files if Path(f).name != f]:
        raise CheckpointError(f"{index} names files outside its folder: {', '.join(outside)}")
    if missing := [f for f in files if not (folder / f).exists()]:
        raise CheckpointError(
            f"{index.name} names {len(missing)} of {len(files)} files that are not in {folder}: "
            f"{', '.join(missing)}; the download or copy is incomplete"
        )
    parts = {f: _open_file(folder / f, allow_pickle) for f in files}
    absent = [f"{name} (in {f})" for name, f in listed.items() if name not in parts[f].entries]
    extra = [f"{n} (in {f})" for f, part in parts.items() for n in part.entries if listed.get(n) != f]
    if absent or extra:
        raise CheckpointError(
            f"{index} and its shards disagree: they belong to different saves"
            + (f"; listed but not there: {_some(absent)}" if absent else "")
            + (f"; there but not listed: {_some(extra)}" if extra else "")
        )
    loaded = {name: value for part in parts.values() for name, value in part._loaded.items()}
    return Tensors({name: parts[f].entries[name] for name, f in listed.items()}, loaded)


def _header(path: Path) -> dict[str, Entry]:
    """Read and check a safetensors header: 8 bytes of length, JSON, then the values without gaps."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(512)
        refuse_impostor(path, head, "a safetensors file")
        length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
        if len(head) <= 8 or (head[8:9] == b"{" and length > size - 8):
            raise CheckpointError(f"{path} is truncated: {size:,} bytes end within its header; copy it again")
        if head[8:9] != b"{" or length > 100_000_000:
            raise CheckpointError(f"{path} is not a safetensors file: it begins with {head[:16]!r}")
        file.seek(8)
        raw = file.read(length)
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__", {})
        assert isinstance(metadata, dict)
        spans = {
            n: (str(h["dtype"]), tuple(map(int, h["shape"])), *h["data_offsets"]) for n, h in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        raise CheckpointError(f"{path} has a damaged safetensors header: {error!r}") from error
    at = 0
    for name, (dtype, shape, begin, end) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if dtype not in DTYPES:
            raise CheckpointError(f"{path}: tensor {name} has dtype {dtype}; known are {', '.join(DTYPES)}")
        if begin != at or end - begin != prod(shape) * DTYPES[dtype].itemsize:
            raise CheckpointError(
                f"{path} has a damaged safetensors header: the span of {name} does not fit its shape"
            )
        at = end
    promised = 8 + length + at
    if size < promised:
        raise CheckpointError(
            f"{path} is truncated: it has {size:,} of {promised:,} bytes; "
            "the download or copy was cut, repeat it"
        )
    if size > promised:
        raise CheckpointError(f"{path} is damaged: {size - promised:,} bytes follow the last tensor")
    return {name: Entry(path, shape, DTYPES[dtype]) for name, (dtype, shape, _, _) in spans.items()}


def _looks_pickled(path: Path) -> bool:
    with open(path, "rb") as file:
        head = file.read(9)
    zipped, protocol = (
        head.startswith(b"PK\x03\x04"),
        head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05",
    )
    return zipped or (protocol and head[8:9] != b"{")


def _pickle_refused(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a pickle (torch.save), not a safetensors file, and opening it can run code. If you trust "
        "where it comes from, pass allow_pickle=True (--allow-pickle): it is then read with weights_only"
    )


def _open_pickle(path: Path) -> Tensors:
    try:
        with open(path, "rb") as file:  # a file, not a name: torch.load goes by the suffix of a name
            value = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for a bad archive
        raise CheckpointError(
            f"{path} cannot be read as tensors only: {str(error).splitlines()[0]}"
        ) from error
    for wrapper in ("state_dict", "model"):
        if isinstance(value, dict) and isinstance(value.get(wrapper), dict):
            value = value[wrapper]
    if not isinstance(value, dict) or not value:
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a dict of named tensors")
    if odd := [str(name) for name, item in value.items() if not isinstance(item, Tensor)]:
        raise CheckpointError(f"{path} holds entries that are not tensors: {_some(odd)}")
    tensors = {str(name): item.detach() for name, item in value.items()}
    return Tensors({n: Entry(path, tuple(t.shape), t.dtype) for n, t in tensors.items()}, tensors)


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
