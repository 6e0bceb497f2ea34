"""Tensors to disk: safetensors files, streamed tensor by tensor through `disk`; shards and their index."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.storage import disk
from headway.checkpoints.storage.files import Put, json_text, write_file
from headway.checkpoints.storage.headers import DTYPES
from headway.checkpoints.storage.lazy import forms, renamed
from headway.checkpoints.storage.tensors import INDEX, SINGLE
from headway.errors import CheckpointError

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int, metadata: Mapping[str, str] | None = None
) -> None:
    """Write into a folder being filled (see `atomic_folder`): one file, or shards of at most `shard_bytes`
    each and their index. A tensor larger than `shard_bytes` gets a shard of its own. The names keep their
    order."""
    if shard_bytes <= 0:
        raise CheckpointError(f"the largest shard must be a positive number of bytes, got {shard_bytes}")
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, form in forms(tensors).items():
        nbytes = form.nbytes
        if shards[-1] and nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= nbytes
    if len(shards) == 1:
        write_safetensors(folder / SINGLE, tensors, metadata)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, renamed(tensors, {name: name for name in names}), metadata)
        weight_map.update(dict.fromkeys(names, file))
    total = sum(form.nbytes for form in forms(tensors).values())
    write_file(folder / INDEX, json_text({"metadata": {"total_size": total}, "weight_map": weight_map}))


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write one safetensors file that does not exist yet, tensor by tensor (no second copy of all of them
    in memory).

    Equal tensors in equal order give an identical file. The widest dtypes come first, so that every value
    is aligned.
    """
    known = forms(tensors)
    order = sorted(known, key=lambda name: -known[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    at = 0
    for name in order:
        form = known[name]
        if form.dtype not in _NAMES:
            raise CheckpointError(
                f"tensor {name} has dtype {form.dtype}, which safetensors files do not hold"
            )
        end = at + form.nbytes
        header[name] = {"dtype": _NAMES[form.dtype], "shape": list(form.shape), "data_offsets": [at, end]}
        at = end
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
