"""Files that are not what they claim to be are reported; what is written is read back, also by other libraries."""

import json
import pickle
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.errors import CheckpointError
from headway.storage.files import atomic_folder
from headway.storage.lazy import changed
from headway.storage.safetensors import DTYPES, write_safetensors
from headway.storage.tensors import open_tensors, write_tensors


def some_tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(3, 4, generator=g),
        "b": torch.randn(5, generator=g).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "odd": torch.randn(7, 3, generator=g).t(),
        "ids": torch.arange(3),
    }


def same(actual, expected):
    assert set(actual) == set(expected)
    for name in actual:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0)


def test_written_files_are_read_by_us_and_by_safetensors(tmp_path):
    tensors = some_tensors()
    write_safetensors(tmp_path / "x.safetensors", tensors, {"note": "hi"})
    same(dict(open_tensors(tmp_path / "x.safetensors")), tensors)
    same(load_file(tmp_path / "x.safetensors"), tensors)
    write_safetensors(tmp_path / "y.safetensors", tensors, {"note": "hi"})
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()


def test_every_value_is_aligned_whatever_the_order(tmp_path):
    """Readers map values in place; the header is padded to 8 bytes, so wide dtypes must come first."""
    mixed = {
        str(dtype): torch.zeros(3, dtype=dtype)
        for dtype in (torch.int8, torch.bfloat16, torch.float64, torch.float32)
    }
    write_safetensors(tmp_path / "x.safetensors", mixed)
    raw = (tmp_path / "x.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0
    for name, tensor in mixed.items():
        assert header[name]["data_offsets"][0] % tensor.dtype.itemsize == 0


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (None, {"format": "pt"}),
        ({"note": "hi"}, {"format": "pt", "note": "hi"}),
        ({"format": "np"}, {"format": "np"}),
    ],
)
def test_the_header_of_a_file_by_hand(tmp_path, given, written):
    """Wide dtypes come first, tensors of one width in the given order, one after another without a gap."""
    tensors = {
        "small": torch.zeros(3, dtype=torch.int8),
        "ä": torch.ones(2, 2),
        "wide": torch.zeros(1, dtype=torch.float64),
        "none": torch.empty(0, 2),
        "half": torch.zeros((), dtype=torch.float16),
    }
    write_safetensors(tmp_path / "x.safetensors", tensors, given)
    raw = (tmp_path / "x.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    assert list(json.loads(raw[8 : 8 + length]).items()) == [
        ("__metadata__", written),
        ("wide", {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}),
        ("ä", {"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 24]}),
        ("none", {"dtype": "F32", "shape": [0, 2], "data_offsets": [24, 24]}),
        ("half", {"dtype": "F16", "shape": [], "data_offsets": [24, 26]}),
        ("small", {"dtype": "I8", "shape": [3], "data_offsets": [26, 29]}),
    ]
    assert "ä".encode() in raw[8 : 8 + length]
    assert len(raw) == 8 + length + 29
    assert length - len(raw[8 : 8 + length].rstrip()) < 8


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_there_and_back(tmp_path, dtype):
    value = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    write_safetensors(tmp_path / "x.safetensors", {"v": value})
    assert torch.equal(
        open_tensors(tmp_path / "x.safetensors")["v"].view(torch.uint8), value.view(torch.uint8)
    )
    save_file({"v": value}, tmp_path / "y.safetensors")
    entry = open_tensors(tmp_path / "y.safetensors").forms["v"]
    assert (entry.dtype, entry.shape) == (dtype, (5,))


@pytest.mark.parametrize("limit", [1, 40, 80, 10**6])
def test_shards_by_size(tmp_path, limit):
    tensors = some_tensors()
    with atomic_folder(tmp_path / "m") as folder:
        write_tensors(folder, tensors, limit)
    stored = open_tensors(tmp_path / "m")
    same(dict(stored), tensors)
    assert list(stored) == list(tensors) or limit == 10**6
    sizes = {
        file: sum(entry.nbytes for entry in stored.forms.values() if entry.file == file)
        for file in stored.files
    }
    counts = {file: sum(entry.file == file for entry in stored.forms.values()) for file in stored.files}
    assert all(size <= limit or counts[file] == 1 for file, size in sizes.items())
    assert stored.nbytes == sum(sizes.values())


def test_a_missing_name_is_answered_with_the_nearest(tmp_path):
    write_safetensors(tmp_path / "x.safetensors", {"model.norm.weight": torch.ones(1)})
    with pytest.raises(
        CheckpointError, match=r'no tensor .model.norm.wieght. .did you mean "model.norm.weight"'
    ):
        open_tensors(tmp_path / "x.safetensors")["model.norm.wieght"]


def test_tensors_are_a_mapping_that_can_be_asked_what_it_holds(tmp_path):
    """It answers for names that it lacks, too, and reads no values."""
    write_safetensors(tmp_path / "x.safetensors", {"a": torch.ones(1), "b": torch.ones(2)})
    stored = open_tensors(tmp_path / "x.safetensors")
    unread = changed(stored, lambda name, value: pytest.fail(f"{name} was read"))
    for state in (stored, unread, stored.renamed({"a": "b"})):
        assert "a" in state
        assert "c" not in state
        assert 3 not in state
        assert state.get("c") is None
        assert state.get("c", 3) == 3
    assert torch.equal(stored.renamed({"a": "b"}).get("a"), torch.ones(2))


def test_every_truncation_length_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": torch.ones(2), "b": torch.ones(1, dtype=torch.int8)})
    raw = path.read_bytes()
    for n in range(1, len(raw)):
        path.write_bytes(raw[:n])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated.*copy"):
            open_tensors(tmp_path)
    path.write_bytes(raw + b"x")
    with pytest.raises(CheckpointError, match="1 bytes follow the last tensor"):
        open_tensors(tmp_path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\n<!DOCTYPE html>\n<html><body>404</body></html>", "HTML page.*fetch"),
        (b"GGUF\x03\x00\x00\x00\x00\x00\x00\x00", "not a safetensors file: it begins with b'GGUF"),
        (struct.pack("<Q", 8) + b"{not js}", "damaged safetensors header"),
        (struct.pack("<Q", 2) + b"{}" + b"\0\0", "2 bytes follow"),
    ],
)
def test_files_that_are_something_else(tmp_path, raw, message):
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors .*{message}"):
        open_tensors(tmp_path)


class Evil:
    def __reduce__(self):
        return (print, ("pickle ran",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_pickles_are_refused_unless_asked_for_and_run_nothing(tmp_path, capsys, name):
    torch.save({"a": torch.ones(2)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name} is a pickle.*allow_pickle=True"):
        open_tensors(tmp_path)
    same(dict(open_tensors(tmp_path, allow_pickle=True)), {"a": torch.ones(2)})
    for protocol in (2, 3, 4, 5):
        (tmp_path / name).write_bytes(pickle.dumps({"a": Evil()}, protocol=protocol))
        with pytest.raises(CheckpointError, match=rf"{name} is a pickle .*allow_pickle"):
            open_tensors(tmp_path)
        with pytest.raises(CheckpointError, match=r"cannot be read as tensors only|not tensors"):
            open_tensors(tmp_path, allow_pickle=True)
    assert "pickle ran" not in capsys.readouterr().out


def test_pickles_that_hold_other_things(tmp_path):
    torch.save({"a": torch.ones(2), "step": 3}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="not tensors: step"):
        open_tensors(tmp_path / "x.pt", allow_pickle=True)
    torch.save([1], tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="holds a list, not a dict"):
        open_tensors(tmp_path / "x.pt", allow_pickle=True)
