"""Sharded saves: each of several processes writes its parts of the tensors into a file of its own, in the safetensors
format of torch.distributed.checkpoint (`HuggingFaceStorageWriter(save_distributed=True)`), without pickles.

    model-shard-00001-of-00002.safetensors      at most one box of each tensor; the header's metadata has by name
        DCP_SHARDING_INFO  {"saved_offsets": [512, 0], "shape": [1024, 256]}: the box's offset, and the whole's shape

    write_shard(folder, "model", 0, 2, {"weight": Part(value, at=(0, 0), shape=(1024, 256))})
    find_shards(folder, "model")      # the files; all of them or CheckpointError
    read_shards(files)                # {"weight": Whole}: shape, dtype, and the places of its boxes

torch can read such a folder, too (`HuggingFaceStorageReader`), but leaves what no box covers uninitialized; here that
is an error. The key "shape" is an extension of headway.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from headway.errors import CheckpointError, as_error
from headway.storage.reading import parse_json
from headway.storage.safetensors import Entry, read_described, write_safetensors

INFO, AT = "DCP_SHARDING_INFO", "saved_offsets"
Place = tuple[int, ...]
Slices = tuple[slice, ...]


class Part(NamedTuple):
    """A box of a tensor: its values, its offset in the whole tensor, and the shape of the whole."""

    value: Tensor
    at: Place
    shape: Place

    @property
    def slices(self) -> Slices:
        """The place of the box in the whole."""
        return _slices(self.at, self.value.shape)


@dataclass(frozen=True)
class Box:
    """A box of a tensor in a file: its offset in the whole tensor, and the file entry with its values."""

    at: Place
    entry: Entry

    @property
    def slices(self) -> Slices:
        """The place of the box in the whole."""
        return _slices(self.at, self.entry.shape)

    def within(self, other: Slices) -> tuple[Slices, Slices] | None:
        """Returns the intersection with another box, as slices of the other and of this one; None if it is empty."""
        pairs = list(zip(self.slices, other, strict=True))
        shared = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs]
        if any(s.start >= s.stop for s in shared):
            return None
        sizes = [s.stop - s.start for s in shared]
        here = _slices([s.start - b.start for s, (_, b) in zip(shared, pairs, strict=True)], sizes)
        return here, _slices([s.start - a.start for s, (a, _) in zip(shared, pairs, strict=True)], sizes)


@dataclass(frozen=True)
class Whole(Entry):
    """A tensor in boxes that cover each of its numbers exactly once; `file` is the first box's."""

    boxes: tuple[Box, ...] = ()


def write_shard(folder: Path, what: str, number: int, count: int, parts: Mapping[str, Part]) -> None:
    """Writes shard `number` of `count`, from 0, of the tensors called `what` ("model", "optimizer")."""
    info = {name: {AT: [*part.at], "shape": [*part.shape]} for name, part in parts.items()}
    file = folder / f"{what}-shard-{number + 1:05d}-of-{count:05d}.safetensors"
    metadata = {INFO: json.dumps(info), "DCP_VERSION": "1.0"}
    write_safetensors(file, {name: part.value for name, part in parts.items()}, metadata)


def find_shards(folder: Path, what: str) -> list[Path]:
    """Returns the shard files of the tensors called `what`, in order; empty if there are none.

    Raises CheckpointError if some of them are missing, or if they belong to different saves."""
    pattern = re.compile(rf"{re.escape(what)}-shard-(\d+)-of-(\d+)\.safetensors")
    shards = {file: match for file in sorted(folder.iterdir()) if (match := pattern.fullmatch(file.name))}
    if not shards:
        return []
    counts = {int(match[2]) for match in shards.values()}
    numbers = sorted(int(match[1]) for match in shards.values())
    if len(counts) > 1 or numbers != [*range(1, max(counts) + 1)]:
        names = ", ".join(file.name for file in shards)
        raise CheckpointError(
            f"{folder} holds {len(shards)} of {max(counts)} shards ({names}): the copy is incomplete, or of two saves"
        )
    return list(shards)


def read_shards(files: Sequence[Path]) -> dict[str, Entry]:
    """Returns the tensors in these shards: shapes, and the places of their boxes; no value is read.

    Raises CheckpointError, naming the file, for what `read_described` refuses, for boxes that do not fit their tensor,
    and for a tensor whose boxes overlap or do not cover it."""
    boxes: dict[str, list[Box]] = {}
    shapes: dict[str, Place] = {}
    for file in files:
        entries, metadata = read_described(file)
        info = _info(file, metadata, entries)
        for name, entry in entries.items():
            at, shape = info[name]
            tensor_boxes = boxes.setdefault(name, [])
            if shapes.setdefault(name, shape) != shape or any(
                entry.dtype != b.entry.dtype for b in tensor_boxes[:1]
            ):
                raise CheckpointError(
                    f"{file} and {tensor_boxes[0].entry.file.name} disagree on the shape or dtype of {name}"
                )
            tensor_boxes.append(Box(at, entry))
    return {name: _whole(name, shapes[name], tensor_boxes) for name, tensor_boxes in boxes.items()}


def _info(
    file: Path, metadata: Mapping[str, str], entries: Mapping[str, Entry]
) -> dict[str, tuple[Place, Place]]:
    """Returns for each tensor in a shard the offset of its box and the shape of the whole."""
    fault = f"{file} is not a shard: its header has no valid {INFO}"
    with as_error(CheckpointError, fault, ValueError, KeyError, TypeError):
        listed = parse_json(metadata.get(INFO, "").encode())
        places = {name: (tuple(listed[name][AT]), tuple(listed[name]["shape"])) for name in entries}
    for name, (at, shape) in places.items():
        sizes = entries[name].shape
        fits = len(at) == len(shape) == len(sizes) and all(
            type(a) is int and type(n) is int and 0 <= a <= a + size <= n
            for a, n, size in zip(at, shape, sizes, strict=True)
        )
        if not fits:
            raise CheckpointError(
                f"{file} is damaged: the box of {name}, {sizes} at {at}, does not fit into {shape}"
            )
    return places


def _whole(name: str, shape: Place, boxes: Sequence[Box]) -> Entry:
    first = boxes[0].entry
    if len(boxes) == 1 and first.shape == shape:
        return first
    folder, held = first.file.parent, sum(prod(box.entry.shape) for box in boxes)
    if held != prod(shape) or _overlap(boxes):
        raise CheckpointError(
            f"{folder}: the shards hold {held:,} of the {prod(shape):,} numbers of {name}, or some of them twice: "
            "they belong to different saves"
        )
    return Whole(shape, first.dtype, first.file, 0, None, tuple(boxes))


def _overlap(boxes: Sequence[Box]) -> bool:
    """Returns whether two boxes overlap. Sorted along the axis with the most distinct offsets, each box is compared
    with those that still extend beyond its beginning."""
    axis = max(range(len(boxes[0].at)), key=lambda d: len({box.at[d] for box in boxes}), default=None)
    if axis is None:
        return len(boxes) > 1
    open_: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.at[axis]):
        open_ = [earlier for earlier in open_ if earlier.slices[axis].stop > box.at[axis]]
        if any(box.within(earlier.slices) is not None for earlier in open_):
            return True
        open_.append(box)
    return False


def _slices(at: Sequence[int], shape: Sequence[int]) -> Slices:
    return tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))
