"""Tensors on disk: safetensors files, shards with an index, and (on request) torch pickles; read lazily.

    tensors = open_tensors(folder_or_file)      # a Mapping: names and shapes are known, values are read on access

The header of every file is checked against the size of the file before a value is read, so that the error for a
truncated file, a git-lfs pointer, an HTML page or a pickle names it as such.
"""

import mmap
from collections.abc import Mapping
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from headway.errors import CheckpointError
from headway.storage.files import json_text, write_file
from headway.storage.lazy import LazyTensors, lazy
from headway.storage.pickles import looks_pickled, pickle_refused, read_pickle
from headway.storage.reading import open_regular, read_json
from headway.storage.safetensors import Entry, check_form, read_described, write_safetensors
from headway.storage.shards import Whole, find_shards, read_shards

MODEL = "model"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
PIECE = 16 << 20


class Tensors(LazyTensors):
    """Named tensors of one checkpoint. Names, shapes and dtypes are known; a value is memory-mapped on access, and
    writing to it does not change the file."""

    forms: Mapping[str, Entry]

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        super().__init__(entries)
        self._maps: WeakValueDictionary[Path, mmap.mmap] = WeakValueDictionary()

    def __getitem__(self, name: str) -> Tensor:
        self.check_name(name)
        return self.part(name, tuple(slice(0, size) for size in self.forms[name].shape))

    def _value(self, entry: Entry) -> Tensor:
        if entry.value is not None:
            return entry.value
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if (values := self._maps.get(entry.file)) is None:
            values = self._maps[entry.file] = _map(entry.file, 0, 0)
        if entry.at + entry.nbytes > len(values):
            raise _cut(entry.file)
        return _flat(values, entry, entry.at, entry.nbytes).view(entry.shape)

    def part(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """Returns `self[name][box]`; each slice of the box must have a start and a stop."""
        self.check_name(name)
        entry = self.forms[name]
        if not isinstance(entry, Whole):
            return self._value(entry)[box]
        value = torch.empty([s.stop - s.start for s in box], dtype=entry.dtype)
        for piece in entry.boxes:
            if (shared := piece.within(box)) is not None:
                target, source = shared
                value[target] = self._value(piece.entry)[source]
        return value

    def copy_into(self, name: str, target: Tensor) -> None:
        """Copies one value into `target`, mapping piece by piece, so that the file takes up no memory."""
        self.check_name(name)
        entry = self.forms[name]
        assert tuple(target.shape) == entry.shape, (name, target.shape, entry.shape)
        if isinstance(entry, Whole):
            for box in entry.boxes:
                target[box.slices] = self._value(box.entry)
            return
        if entry.value is not None or not target.is_contiguous():
            target.copy_(self[name])
            return
        flat = target.view(-1)
        for begin in range(0, entry.nbytes, PIECE):
            at, nbytes = entry.at + begin, min(PIECE, entry.nbytes - begin)
            spare = at % mmap.ALLOCATIONGRANULARITY
            piece = _flat(_map(entry.file, at - spare, spare + nbytes), entry, spare, nbytes)
            start = begin // entry.dtype.itemsize
            flat[start : start + len(piece)].copy_(piece)

    def renamed(self, names: Mapping[str, str]) -> "Tensors":
        """Returns the same values under other names, {new name: old name}, without the names that are not listed."""
        return Tensors({new: self.forms[old] for new, old in names.items()})

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the values."""
        return tuple(dict.fromkeys(file for entry in self.forms.values() for file in _files(entry)))


def open_tensors(path: str | Path, *, allow_pickle: bool = False) -> Tensors:
    """Opens the tensors of a folder or of one file (`.safetensors`, an index, or a pickle if `allow_pickle`).

    Raises CheckpointError for a file that is missing, truncated, empty, a git-lfs pointer, an HTML page or a pickle;
    for an index that names a missing file or disagrees with its shards; and for a folder with no weights, or two sets.
    A folder may hold links to files elsewhere; its index may name files of the folder only.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"there is no file or folder {path}")
    if path.is_dir():
        if (parts := open_shards(path, MODEL)) is not None:
            return parts
        path = _weights_of(path, allow_pickle)
    if path.name.endswith(".index.json"):
        return _open_shards(path, allow_pickle)
    return _open_file(path, allow_pickle)


def open_shards(folder: Path, what: str) -> Tensors | None:
    """Opens the tensors called `what` in the shards of a folder (`headway.storage.shards`); None if it has none."""
    files = find_shards(folder, what)
    if files and what == MODEL and any((folder / name).exists() for name in (SINGLE, INDEX)):
        raise CheckpointError(
            f"{folder} holds two sets of weights, shards and {SINGLE}: remove those that are out of date"
        )
    return Tensors(read_shards(files)) if files else None


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes into a folder that is being filled (see `atomic_folder`): one file, or shards of at most `shard_bytes`
    each and their index. A tensor larger than `shard_bytes` gets a shard of its own. The names keep their order."""
    if shard_bytes <= 0:
        raise CheckpointError(f"shard_bytes must be a positive number of bytes, got {shard_bytes}")
    shards: list[list[str]] = [[]]
    bytes_left = shard_bytes
    for name, form in lazy(tensors).forms.items():
        nbytes = form.nbytes
        if shards[-1] and nbytes > bytes_left:
            shards.append([])
            bytes_left = shard_bytes
        shards[-1].append(name)
        bytes_left -= nbytes
    if len(shards) == 1:
        write_safetensors(folder / SINGLE, tensors, metadata)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, lazy(tensors).renamed({name: name for name in names}), metadata)
        weight_map.update(dict.fromkeys(names, file))
    total = sum(form.nbytes for form in lazy(tensors).forms.values())
    write_file(folder / INDEX, json_text({"metadata": {"total_size": total}, "weight_map": weight_map}))


def _files(entry: Entry) -> tuple[Path, ...]:
    return tuple(box.entry.file for box in entry.boxes) if isinstance(entry, Whole) else (entry.file,)


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
        raise pickle_refused(pickled[0])
    if broken := [name for name in (SINGLE, INDEX) if (folder / name).is_symlink()]:
        raise CheckpointError(f"{folder / broken[0]} is a broken link; download the file again")
    shards = sorted(p.name for p in folder.glob("model-*-of-*.safetensors"))
    if shards:
        raise CheckpointError(
            f"{folder} holds shards ({shards[0]}, ...) but no {INDEX}: the copy is incomplete"
        )
    names = ", ".join(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"
    raise CheckpointError(f"{folder} holds no weights: expected {SINGLE} or {INDEX}, found {names}")


def _open_file(path: Path, allow_pickle: bool) -> Tensors:
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; a file of weights is expected under that name")
    if not looks_pickled(path):
        return Tensors(read_described(path)[0])
    if not allow_pickle:
        raise pickle_refused(path)
    return Tensors(read_pickle(path))


def _open_shards(index: Path, allow_pickle: bool) -> Tensors:
    folder, listed = index.parent, read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(v, str) for v in listed.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to file names")
    for name in listed:
        check_form(index, name, ())
    files = sorted(set(listed.values()))
    if outside := [f for f in files if Path(f).name != f or f in ("", "..") or not f.isprintable()]:
        raise CheckpointError(f"{index} names files outside its folder: {_some([f[:80] for f in outside])}")
    if missing := [f for f in files if len(f) > 255 or not (folder / f).exists()]:
        raise CheckpointError(
            f"{index.name} names {len(missing)} of {len(files)} files that are not in {folder}: "
            f"{_some([f[:80] for f in missing])}; the download or copy is incomplete"
        )
    parts = {f: _open_file(folder / f, allow_pickle) for f in files}
    missing_tensors = [f"{name} (in {f})" for name, f in listed.items() if name not in parts[f].forms]
    unlisted = [f"{n} (in {f})" for f, part in parts.items() for n in part.forms if listed.get(n) != f]
    if missing_tensors or unlisted:
        raise CheckpointError(
            f"{index} and its shards disagree: they belong to different saves"
            + (f"; listed but not there: {_some(missing_tensors)}" if missing_tensors else "")
            + (f"; there but not listed: {_some(unlisted)}" if unlisted else "")
        )
    return Tensors({name: parts[f].forms[name] for name, f in listed.items()})


def _map(path: Path, at: int, length: int) -> mmap.mmap:
    """Maps `length` bytes (0: all) of a file from offset `at`; writes to the mapping stay in this process."""
    with open_regular(path) as file:
        if file.seek(0, 2) < max(at + length, 1):
            raise _cut(path)
        return mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=at)


def _flat(values: mmap.mmap, entry: Entry, at: int, nbytes: int) -> Tensor:
    """Returns the numbers from byte `at` as one row; copied only if they are not aligned."""
    if at % entry.dtype.itemsize:
        return torch.frombuffer(bytearray(values[at : at + nbytes]), dtype=entry.dtype)
    return torch.frombuffer(values, dtype=entry.dtype, count=nbytes // entry.dtype.itemsize, offset=at)


def _cut(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} has become shorter since it was opened; open it again")


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
