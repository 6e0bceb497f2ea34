"""Tensor files made to hang, to fill memory, or to run code: reported, and nothing of their size is allocated."""

import json
import os
import struct
import zipfile

import pytest
import torch

from headway.checkpoints.formats import llama2c
from headway.errors import CheckpointError, HeadwayError
from headway.storage.safetensors import LONGEST
from headway.storage.tensors import open_tensors
from tests.checkpoints.hostile import GOOD, safetensors, small_memory


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": GOOD, "b": GOOD}, "the span of b, 0 to 8, overlaps another"),
        ({"a": GOOD, "b": {**GOOD, "data_offsets": [4, 12]}}, "the span of b, 4 to 12, overlaps another"),
        ({"a": GOOD, "b": {**GOOD, "data_offsets": [9, 17]}}, "the span of b, 9 to 17, leaves a gap"),
        ({"a": {**GOOD, "data_offsets": [8, 0]}}, "the span of a, 8 to 0, leaves a gap"),
        ({"a": {**GOOD, "data_offsets": [4, 12]}}, "the span of a, 4 to 12, leaves a gap"),
        ({"a": {**GOOD, "shape": [3]}}, "the span of a, 0 to 8, does not fit its shape"),
        ({"a": {**GOOD, "dtype": "F4"}}, "there is no dtype 'F4' .*there are F64"),
        ({"a": {**GOOD, "shape": [-2]}}, r"shape of 'a' must be whole numbers .* got \[-2\]"),
        ({"a": {**GOOD, "shape": [-1, -2]}}, "shape of 'a' must be whole numbers"),
        ({"a": {**GOOD, "shape": [2.0]}}, r"shape of 'a' must be whole numbers .* got \[2.0\]"),
        ({"a": {**GOOD, "shape": [True, 2]}}, "shape of 'a' must be whole numbers"),
        ({"a": {**GOOD, "shape": "2"}}, "shape of 'a' must be whole numbers"),
        ({"a": {**GOOD, "shape": [2**64]}}, "shape of 'a' must be whole numbers from 0 to below 2.63"),
        ({"a": {**GOOD, "shape": [2**40, 2**40]}}, "tensor a has 2 axes of .*: no tensor is that large"),
        ({"a": {**GOOD, "shape": [2**40, 2**40, 0], "data_offsets": [0, 0]}}, "tensor a has 3 axes .*: no tensor is"),
        ({"a": {**GOOD, "shape": [1] * 65 + [2]}}, "tensor a has 66 axes"),
        ({"a": {**GOOD, "data_offsets": [0.0, 8.0]}}, r"data_offsets of 'a' must be two whole numbers .* \[0.0, 8.0\]"),
        ({"a": {**GOOD, "data_offsets": ["0", "8"]}}, "data_offsets of 'a' must be two whole numbers"),
        ({"a": {**GOOD, "data_offsets": [-8, 0]}}, "data_offsets of 'a' must be two whole numbers from 0"),
        ({"a": {**GOOD, "data_offsets": [0, 8, 8]}}, "data_offsets of 'a' must be two whole numbers"),
        ({"a": {**GOOD, "dtype": ["F32"]}}, "there is no dtype .*there are F64"),
        ({"a": {**GOOD, "more": 1}}, "'a' must have dtype, shape and data_offsets"),
        ({"a": [1, 2]}, r"'a' must have dtype, shape and data_offsets, got \[1, 2\]"),
        ({"__metadata__": {"format": 1}, "a": GOOD}, "__metadata__ must map names to text"),
        ({"a\x1b[2J": GOOD}, "the tensor name 'a.x1b.2J' .* is unprintable"),
        ({"\ud800": GOOD}, "the tensor name '.ud800'"),
        ({"a" * 501: GOOD}, "the tensor name 'aaa.*501 characters.* or over 500"),
        (b'{"a":%b,"a":%b}' % ((json.dumps(GOOD).encode(),) * 2), "the key 'a' occurs twice"),
        (b'{"\xff\xfe":1}', "it is not UTF-8: invalid start byte at byte 2"),
        (b'{"a":' + b"[" * 60 + b"]" * 60 + b"}", "'a' must have dtype"),
        (b'{"a":' + b"[" * 70 + b"]" * 70 + b"}", "nested more than 64 levels"),
        (b'{"a":' + b"[" * 200_000, "nested more than 64 levels"),
        (b'{"a": ' + b"1" * 5000 + b"}", "Exceeds the limit"),
        (b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}', "1e999 is beyond the largest number"),
        (b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', "NaN is not JSON"),
    ],
    ids=lambda x: str(x)[:40],
)  # fmt: skip
def test_a_header_that_cannot_be_is_named(tmp_path, header, message):
    path = safetensors(tmp_path / "x.safetensors", header)
    with pytest.raises(CheckpointError, match=message) as error, small_memory():
        open_tensors(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10 * 10**9, LONGEST + 1])
@pytest.mark.parametrize("size", [100, 11 * 10**9], ids=["small file", "file of 11 GB"])
def test_an_absurd_length_of_a_header_is_not_read(tmp_path, length, size):
    path = safetensors(tmp_path / "x.safetensors", {"a": GOOD}, length=length)
    os.truncate(path, size)  # sparse
    with (
        pytest.raises(CheckpointError, match=rf"it claims {length:,} bytes, above the limit of 33,554,432"),
        small_memory(),
    ):
        open_tensors(path)


@pytest.mark.parametrize("header", [
    (8, 8, 2**31 - 1, 2, 2, 8, 8), (2**30, 8, 1, 1, 1, 8, 8), (8, 2**31 - 1, 2, 2, 2, 2**31 - 1, 2**31 - 1),
    (6, 8, 1, 2, 2, 8, 8), (8, 8, -1, 2, 2, 8, 8), (8, 8, 1, 0, 2, 8, 8), (8, 8, 1, 2, 2, 0, 8)], ids=str)  # fmt: skip
def test_a_header_of_llama2_c_that_cannot_be_is_named(tmp_path, header):
    (tmp_path / "m.bin").write_bytes(struct.pack("<7i", *header) + bytes(500))
    with pytest.raises(HeadwayError, match=r"m\.bin"), small_memory():
        llama2c.read(tmp_path / "m.bin")


def test_archives_that_torch_does_not_write_are_named(tmp_path):
    path = tmp_path / "x.pth"
    torch.save({"a": torch.arange(4096.0)}, path)
    raw = path.read_bytes()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "y.pth", "w", zipfile.ZIP_DEFLATED) as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))
    with pytest.raises(CheckpointError, match=r"y\.pth is a compressed archive"):
        open_tensors(tmp_path / "y.pth", allow_pickle=True)
    for cut in (5, 200, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:cut])
        with pytest.raises(
            CheckpointError, match=r"x\.pth is a damaged archive; copy or download it again: ."
        ):
            open_tensors(path, allow_pickle=True)


def test_pickled_tensors_are_mapped_where_they_lie(tmp_path):
    """Views, parameters, transposes and other dtypes are as torch.load gives them; archives before torch 1.6, too."""
    x = torch.randn(6, 4)
    stored = {"x": x, "rows": x[2:5], "t": x.t(), "p": torch.nn.Parameter(x[0].clone()), "b": x.bfloat16(),
              "empty": x[:0], "scalar": torch.tensor(3)}  # fmt: skip
    for legacy in (False, True):
        torch.save(stored, tmp_path / "x.pth", _use_new_zipfile_serialization=not legacy)
        loaded = open_tensors(tmp_path / "x.pth", allow_pickle=True)
        assert all(torch.equal(loaded[name], value) for name, value in stored.items())
    del stored["t"]
    torch.save(stored, tmp_path / "x.pth")
    loaded = open_tensors(tmp_path / "x.pth", allow_pickle=True)
    assert all(entry.value is None for entry in loaded.forms.values())
    for name, value in stored.items():
        target = torch.empty_like(value)
        loaded.copy_into(name, target.detach())
        assert torch.equal(target, value)
