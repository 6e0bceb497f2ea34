"""Folders whose index leads elsewhere, and files that are not regular or unreadable: reported, without waiting."""

import json
import os
import socket

import pytest
import torch

from headway.checkpoints import inspect, load_folder, load_model, save_folder
from headway.checkpoints.formats import llama2c
from headway.errors import CheckpointError
from headway.models import build
from headway.storage.reading import open_regular
from headway.storage.tensors import open_tensors
from tests.checkpoints.hostile import SPEC


@pytest.fixture
def folder(tmp_path):
    save_folder(tmp_path / "m", build(SPEC, seed=0), generation={"eos_token_id": 2})
    return tmp_path / "m"


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "..", ".", "", "sub/model.safetensors", "a\x00b", "a\nb", "\ud800", "../m/x"],
)  # fmt: skip
def test_an_index_names_files_of_its_folder_only(tmp_path, name):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"index\.json names files outside its folder"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("listed", [{"a": 1}, {"a": ["x"]}, ["a"], {}, None, "x", {"a": None}])
def test_an_index_whose_map_is_none_is_named(tmp_path, listed):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(CheckpointError, match=r"index\.json has no weight_map"):
        open_tensors(tmp_path)


def test_an_index_of_a_file_that_is_not_there_is_named(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 300}}))
    with pytest.raises(CheckpointError, match=r"names 1 of 1 files that are not in"):
        open_tensors(tmp_path)


def test_an_index_that_names_the_wrong_shard(tmp_path):
    save_folder(tmp_path / "m", build(SPEC, seed=0), shard_bytes=4000)
    index = tmp_path / "m" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    first, second = sorted(set(listed["weight_map"].values()))[:2]
    name = next(n for n, file in listed["weight_map"].items() if file == first)
    for change, message in (
        (
            {name: second},
            rf"listed but not there: {name} .in {second}.; there but not listed: {name} .in {first}",
        ),
        ({"more": second}, rf"listed but not there: more .in {second}.$"),
    ):
        index.write_text(json.dumps({"weight_map": listed["weight_map"] | change}))
        with pytest.raises(CheckpointError, match=message):
            load_folder(tmp_path / "m")
    index.write_text(
        json.dumps({"weight_map": {n: file for n, file in listed["weight_map"].items() if n != name}})
    )
    with pytest.raises(CheckpointError, match=rf"there but not listed: {name} .in {first}"):
        load_folder(tmp_path / "m")


def test_a_folder_of_links_is_read_and_a_dangling_one_is_named(folder, tmp_path):
    """The cache of the Hugging Face hub is such a folder; its index may still only name files of the folder."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in folder.iterdir():
        (linked / file.name).symlink_to(file)
    assert load_model(linked).spec == load_model(folder).spec
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a broken link"):
        load_model(linked)


FILES = ("config.json", "model.safetensors", "generation_config.json", "tokenizer.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pipe", "socket", "folder"])
def test_what_is_no_regular_file_is_named_and_not_waited_for(folder, name, kind, monkeypatch, request):
    file = folder / name
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        monkeypatch.chdir(folder)  # the path of a socket is at most 107 bytes
        listener = socket.socket(socket.AF_UNIX)
        request.addfinalizer(listener.close)
        listener.bind(name)
    with pytest.raises(
        CheckpointError,
        match=rf"{name}(: (it is not a regular file|Is a directory|No such device)| is a fol)",
    ):
        inspect(folder)


def test_other_formats_do_not_wait_for_pipes_either(tmp_path):
    os.mkfifo(tmp_path / "m.bin")
    for reader in (llama2c.read, llama2c.looks_like, lambda path: open_tensors(path, allow_pickle=True)):
        with pytest.raises(CheckpointError, match=r"m\.bin: it is not a regular file"):
            reader(tmp_path / "m.bin")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_what_may_not_be_read_is_named(folder, name, monkeypatch):
    original = os.open

    def refuses(path, *args, **kwargs):
        if str(path).endswith(name):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(CheckpointError, match=rf"cannot read .*{name}: Permission denied"):
        load_model(folder)


def test_a_file_that_became_shorter_is_named_instead_of_a_crash(folder):
    tensors = load_folder(folder).tensors
    os.truncate(folder / "model.safetensors", 2000)
    target = torch.empty(tensors.forms["lm_head.weight"].shape)
    for reader in (lambda: tensors["lm_head.weight"], lambda: tensors.copy_into("lm_head.weight", target)):
        with pytest.raises(CheckpointError, match="has become shorter since it was opened"):
            reader()


def test_an_empty_folder_and_a_file_are_named(tmp_path):
    (tmp_path / "m").mkdir()
    with pytest.raises(CheckpointError, match=r"has no config\.json: it is not a model folder"):
        load_folder(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"holds no weights: .* found nothing"):
        open_tensors(tmp_path / "m")
    (tmp_path / "m" / "readme.md").write_text("hello")
    with pytest.raises(CheckpointError, match=r"holds no weights: .* found readme\.md"):
        open_tensors(tmp_path / "m")
    (tmp_path / "m" / "final").mkdir()
    (tmp_path / "m" / "final" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"the model of this run is .*m/final$"):
        load_folder(tmp_path / "m")
    with pytest.raises(CheckpointError, match="does not exist: a model is"):
        load_folder(tmp_path / "nothing")
    (tmp_path / "f").write_text("x")
    with pytest.raises(CheckpointError, match="is a file of unknown format"):
        load_folder(tmp_path / "f")
    with pytest.raises(CheckpointError, match="No such file"):
        open_regular(tmp_path / "nowhere")
