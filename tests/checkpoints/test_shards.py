"""Tensors read from shards are those that were cut, whichever file holds which box; what is wrong is reported."""

import json
from itertools import pairwise, product
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.errors import CheckpointError
from headway.storage.safetensors import write_safetensors
from headway.storage.shards import INFO, Part, write_shard
from headway.storage.tensors import open_shards, open_tensors

Parts = list[dict[str, Part]]


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[dict[str, Tensor], Parts]:
    """Draws tensors, and each file's parts of them: boxes of a grid, at most one per file, some of them empty."""
    files = draw(st.integers(1, 6))
    tensors: dict[str, Tensor] = {}
    parts: Parts = [{} for _ in range(files)]
    for name in draw(
        st.lists(st.sampled_from(["a", "b.weight", "b.weight/exp_avg"]), unique=True, min_size=1)
    ):
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        value = torch.arange(float(prod(shape))).reshape(shape).to(dtype)
        grid, remaining = list[list[slice]](), files
        for n in shape:
            pieces = draw(st.integers(1, remaining))
            remaining //= pieces
            edges = sorted(draw(st.lists(st.integers(0, n), min_size=pieces - 1, max_size=pieces - 1)))
            grid.append([slice(a, b) for a, b in pairwise([0, *edges, n])])
        order = draw(st.permutations(range(files)))
        tensors[name] = value
        for file, box in zip(order, product(*grid), strict=False):
            parts[file][name] = Part(value[box], tuple(s.start for s in box), tuple(shape))
    return tensors, parts


def written(folder: Path, parts: Parts, name: str = "model") -> Path:
    for number, file_parts in enumerate(parts):
        write_shard(folder, name, number, len(parts), file_parts)
    return folder


@given(cut=cut_tensors())
def test_cut_and_read_again(cut: tuple[dict[str, Tensor], Parts]) -> None:
    tensors, parts = cut
    with TemporaryDirectory() as folder:
        stored = open_tensors(written(Path(folder), parts))
        assert stored.keys() == tensors.keys()
        assert len(stored.files) <= len(parts)
        for name, value in tensors.items():
            assert torch.equal(stored[name], value)
            assert stored.forms[name].dtype == value.dtype
            target = torch.full(value.shape[::-1], 7.0).permute([*reversed(range(value.dim()))])
            stored.copy_into(name, target)
            assert torch.equal(target, value.float())
            for box in (
                tuple(slice(n // 3, n) for n in value.shape),
                tuple(slice(0, n // 2) for n in value.shape),
            ):
                assert torch.equal(stored.part(name, box), value[box])


def halves() -> Parts:
    value = torch.arange(12.0).reshape(6, 2)
    return [{"a": Part(value[:3], (0, 0), (6, 2))}, {"a": Part(value[3:], (3, 0), (6, 2))}]


def test_what_is_missing_twice_or_cut_off_is_named(tmp_path: Path) -> None:
    def refused(name: str, parts: Parts, spoil: Any, message: str) -> None:
        folder = tmp_path / name
        folder.mkdir()
        written(folder, parts)
        spoil(folder)
        with pytest.raises(CheckpointError, match=message):
            open_tensors(folder)

    second_shard = "model-shard-00002-of-00002.safetensors"

    def truncate(folder: Path) -> None:
        data = (folder / second_shard).read_bytes()
        (folder / second_shard).write_bytes(data[:-1])

    part = halves()[0]["a"]
    fragment = Part(part.value[:2], (0, 0), (6, 2))
    refused("cut", halves(), truncate, rf"cut/{second_shard} is truncated: it has \d+ of \d+ bytes")
    refused("gone", halves(), lambda f: (f / second_shard).unlink(), "holds 1 of 2 shards")
    refused("hole", [{"a": fragment}, halves()[1]], lambda f: None, "hold 10 of the 12 numbers of a")
    refused("twice", [halves()[0], {"a": part}], lambda f: None, "numbers of a, or some of them twice")
    refused(
        "form",
        [halves()[0], {"a": part._replace(at=(0, 0), shape=(3, 2))}],
        lambda f: None,
        "disagree on the shape or dtype of a",
    )
    refused(
        "dtype",
        [halves()[0], {"a": halves()[1]["a"]._replace(value=halves()[1]["a"].value.to(torch.float16))}],
        lambda f: None,
        "disagree on the shape or dtype of a",
    )
    refused(
        "beyond",
        [{"a": part._replace(at=(4, 0))}],
        lambda f: None,
        r"the box of a, \(3, 2\) at \(4, 0\), does not fit into \(6, 2\)",
    )
    refused("sets", halves(), lambda f: write_safetensors(f / "model.safetensors", {}), "two sets of weights")
    for info in ({}, {INFO: "[]"}, {INFO: json.dumps({"a": {"saved_offsets": [0, 0]}})}):
        folder = tmp_path / f"info-{len(str(info))}"
        folder.mkdir()
        write_safetensors(folder / "model-shard-00001-of-00001.safetensors", {"a": part.value}, info)
        with pytest.raises(CheckpointError, match="its header has no valid DCP_SHARDING_INFO"):
            open_tensors(folder)


def test_sets_of_shards_lie_side_by_side(tmp_path: Path) -> None:
    written(
        written(tmp_path, halves()), [{"a/exp_avg": halves()[0]["a"]._replace(shape=(3, 2))}], "optimizer"
    )
    moments = open_shards(tmp_path, "optimizer")
    assert moments is not None
    assert list(moments) == ["a/exp_avg"]
    assert open_shards(tmp_path, "other") is None
    assert list(open_tensors(tmp_path)) == ["a"]


@pytest.mark.slow
def test_torch_reads_the_same(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    value = halves()[0]["a"].value, halves()[1]["a"].value
    written(tmp_path, halves())
    state = {"a": torch.zeros(6, 2)}
    with pytest.warns(UserWarning, match="in a single process"):
        load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(state["a"], torch.cat(value))
