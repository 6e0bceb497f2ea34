"""Pickles of torch.save, read only on request, as tensors only, and memory-mapped like any other file.

The archive is a zip file of uncompressed records. Unpickling it on the device "meta" gives every shape and the offset
of every storage without reading the values, which are mapped later. Archives of torch before 1.6 are not zip files and
are read as a whole.
"""

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.errors import CheckpointError, as_error
from headway.storage.reading import open_regular
from headway.storage.safetensors import Entry, check_form

_WRAPPERS = ("state_dict", "model")


def looks_pickled(path: Path) -> bool:
    """Returns whether a file begins as a zip archive or as a raw pickle of protocol 2 to 5."""
    with open_regular(path) as file:
        head = file.read(9)
    protocol = head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05"
    return head.startswith(b"PK\x03\x04") or (protocol and head[8:9] != b"{")


def pickle_refused(path: Path) -> CheckpointError:
    """Returns the error for a pickle if pickles are not allowed."""
    return CheckpointError(
        f"{path} is a pickle (torch.save), not a safetensors file, and opening it can run code. If you trust "
        "where it comes from, pass allow_pickle=True (--allow-pickle): it is then read with weights_only"
    )


def read_pickle(path: Path) -> dict[str, Entry]:
    """Returns the tensors of a pickled dict (or of its "state_dict" or "model").

    Raises CheckpointError for an archive that is broken or compressed, for anything but a dict of tensors, and for
    tensors that reach beyond the file.
    """
    with open_regular(path) as file:
        size = file.seek(0, 2)
    mappable = _plain_archive(path)
    tensors = _tensors(path, "meta" if mappable else "cpu")
    if not all(_lies_in_file(value) for value in tensors.values()):
        tensors, mappable = _tensors(path, "cpu"), False
    entries = {}
    for name, value in tensors.items():
        shape = tuple(value.shape)
        check_form(path, name, shape)
        if not mappable:
            entries[name] = Entry(shape, value.dtype, path, 0, value)
            continue
        storage: Any = value.untyped_storage()
        at = storage._checkpoint_offset + value.storage_offset() * value.dtype.itemsize
        entry = Entry(shape, value.dtype, path, at)
        if at + entry.nbytes > min(size, storage._checkpoint_offset + storage.nbytes()):
            raise CheckpointError(f"{path} is damaged: tensor {name} reaches beyond what is stored")
        entries[name] = entry
    return entries


def _tensors(path: Path, device: str) -> dict[str, Tensor]:
    try:
        with open_regular(path) as file:  # an open file: given a name, torch.load interprets its suffix
            value = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # torch raises many types for a bad archive
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} cannot be read as tensors only: {first}") from error
    for wrapper in _WRAPPERS:
        if isinstance(value, dict) and isinstance(value.get(wrapper), dict):
            value = value[wrapper]
    if not isinstance(value, dict) or not value:
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a dict of named tensors")
    if others := [str(name) for name, item in value.items() if not isinstance(item, Tensor)]:
        raise CheckpointError(f"{path} holds entries that are not tensors: {', '.join(others[:8])}")
    return {str(name): item.detach() for name, item in value.items()}


def _plain_archive(path: Path) -> bool:
    """Returns whether a file is a zip archive whose storages can be mapped."""
    with open_regular(path) as file:
        if not file.read(4).startswith(b"PK\x03\x04"):
            return False
        faults = zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError
        fault = f"{path} is a damaged archive; copy or download it again"
        with as_error(CheckpointError, fault, *faults), zipfile.ZipFile(file) as archive:
            packed = [r.filename for r in archive.infolist() if r.compress_type != zipfile.ZIP_STORED]
            order = [r for r in archive.infolist() if r.filename.endswith("/byteorder") and r.file_size < 16]
            little = all(archive.read(record) == b"little" for record in order)
    if packed:
        raise CheckpointError(
            f"{path} is a compressed archive ({packed[0]}), which torch.save does not write"
        )
    return little


def _lies_in_file(value: Tensor) -> bool:
    has_offset = getattr(value.untyped_storage(), "_checkpoint_offset", None) is not None
    return has_offset and value.layout == torch.strided and value.is_contiguous()
