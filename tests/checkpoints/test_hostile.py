"""Files made to hang, to fill memory, or to be read as something else: named, and nothing of their size is made."""

import json
import os
import pickle
import socket
import struct
import tracemalloc
import zipfile
from contextlib import contextmanager

import pytest
import torch

from headway.checkpoints import inspect, llama2c, load_folder, load_model, open_tensors, save_folder
from headway.checkpoints.headers import LONGEST
from headway.checkpoints.reading import LONGEST_JSON, open_regular, read_json
from headway.errors import CheckpointError, ConfigError, HeadwayError
from headway.models import ModelSpec
from headway.positions import Rotary

SPEC = ModelSpec.of("llama", vocab=61, width=16, layers=2, heads=4, kv_heads=2, hidden=24, init_std=0.3)
GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.fixture
def folder(tmp_path):
    save_folder(tmp_path / "m", SPEC.build(seed=0), generation={"eos_token_id": 2})
    return tmp_path / "m"


@contextmanager
def small_memory(limit=30 << 20):
    """Python may allocate at most `limit` bytes inside."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def set_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def safetensors(path, header, values=bytes(8), length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + values)
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": GOOD, "b": GOOD}, "the span of b, 0 to 8, overlaps another"),
        ({"a": GOOD, "b": {**GOOD, "data_offsets": [4, 12]}}, "the span of b, 4 to 12, overlaps another"),
        ({"a": GOOD, "b": {**GOOD, "data_offsets": [9, 17]}}, "the span of b, 9 to 17, leaves a gap"),
        ({"a": {**GOOD, "data_offsets": [8, 0]}}, "the span of a, 8 to 0, leaves a gap"),
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
        ({"a": {**GOOD, "dtype": ["F32"]}}, "has dtype .*known are F64"),
        ({"a": {**GOOD, "more": 1}}, "'a' must have dtype, shape and data_offsets"),
        ({"a": [1, 2]}, r"'a' must have dtype, shape and data_offsets, and has \[1, 2\]"),
        ({"__metadata__": {"format": 1}, "a": GOOD}, "__metadata__ must map names to text"),
        ({"a\x1b[2J": GOOD}, "a tensor named 'a.x1b.2J', .* cannot all be printed"),
        ({"\ud800": GOOD}, "a tensor named '.ud800'"),
        ({"a" * 501: GOOD}, "a tensor named 'aaa.*501 characters"),
        (b'{"a":%b,"a":%b}' % ((json.dumps(GOOD).encode(),) * 2), "the key 'a' is there twice"),
        (b'{"\xff\xfe":1}', "it is not UTF-8: invalid start byte at byte 2"),
        (b'{"a":' + b"[" * 60 + b"]" * 60 + b"}", "'a' must have dtype"),
        (b'{"a":' + b"[" * 70 + b"]" * 70 + b"}", "nested more than 64 levels"),
        (b'{"a":' + b"[" * 200_000, "nested more than 64 levels"),
        (b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}', "1e999 is beyond the largest number"),
        (b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', "NaN is not JSON"),
    ],
    ids=lambda x: str(x)[:40],
)  # fmt: skip
def test_a_header_that_cannot_be_is_named(tmp_path, header, message):
    path = safetensors(tmp_path / "x.safetensors", header)
    with pytest.raises(CheckpointError, match=message) as caught, small_memory():
        open_tensors(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10 * 10**9, LONGEST + 1])
@pytest.mark.parametrize("size", [100, 11 * 10**9], ids=["small file", "file of 11 GB"])
def test_an_absurd_length_of_a_header_is_not_read(tmp_path, length, size):
    path = safetensors(tmp_path / "x.safetensors", {"a": GOOD}, length=length)
    os.truncate(path, size)  # sparse
    with (
        pytest.raises(CheckpointError, match=rf"it claims {length:,} bytes, and at most 33,554,432"),
        small_memory(),
    ):
        open_tensors(path)


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
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 300}}))
    with pytest.raises(CheckpointError, match=r"names 1 of 1 files that are not in"):
        open_tensors(tmp_path)


def test_an_index_that_names_the_wrong_shard(tmp_path):
    save_folder(tmp_path / "m", SPEC.build(seed=0), shard_bytes=4000)
    index = tmp_path / "m" / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    first, second = sorted(set(whole["weight_map"].values()))[:2]
    name = next(n for n, file in whole["weight_map"].items() if file == first)
    for change, message in (
        (
            {name: second},
            rf"listed but not there: {name} .in {second}.; there but not listed: {name} .in {first}",
        ),
        ({"more": second}, rf"listed but not there: more .in {second}.$"),
    ):
        index.write_text(json.dumps({"weight_map": whole["weight_map"] | change}))
        with pytest.raises(CheckpointError, match=message):
            load_folder(tmp_path / "m")
    index.write_text(json.dumps({"weight_map": {n: f for n, f in whole["weight_map"].items() if n != name}}))
    with pytest.raises(CheckpointError, match=rf"there but not listed: {name} .in {first}"):
        load_folder(tmp_path / "m")


def test_a_folder_of_links_is_read_and_a_dangling_one_is_named(folder, tmp_path):
    """The cache of the Hugging Face hub is such a folder; its index still names files of the folder only."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in folder.iterdir():
        (linked / file.name).symlink_to(file)
    assert load_model(linked).spec == load_model(folder).spec
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a link to a file that is not there"):
        load_model(linked)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_raw_pickle_under_another_name_runs_nothing(folder, protocol, capsys):
    class Evil:
        def __reduce__(self):
            return (print, ("pickle ran",))

    raw = pickle.dumps({"a": Evil()}, protocol=protocol)
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a pickle .*allow_pickle"):
        load_model(folder)
    with pytest.raises(CheckpointError, match=r"cannot be read as tensors only|not tensors"):
        open_tensors(folder, allow_pickle=True)
    assert "pickle ran" not in capsys.readouterr().out


def test_archives_that_torch_does_not_write_are_named(tmp_path):
    path = tmp_path / "x.pth"
    torch.save({"a": torch.arange(4096.0)}, path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "y.pth", "w", zipfile.ZIP_DEFLATED) as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))
    with pytest.raises(CheckpointError, match=r"y\.pth is a compressed archive"):
        open_tensors(tmp_path / "y.pth", allow_pickle=True)
    for cut in (5, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(
            CheckpointError, match=r"x\.pth is a damaged archive: .*; copy or download it again"
        ):
            open_tensors(path, allow_pickle=True)


def test_pickled_tensors_are_mapped_where_they_lie(tmp_path):
    """Views, parameters, transposes and other dtypes as torch.load gives them; archives before 1.6 too."""
    x = torch.randn(6, 4)
    stored = {"x": x, "rows": x[2:5], "t": x.t(), "p": torch.nn.Parameter(x[0].clone()), "b": x.bfloat16(),
              "empty": x[:0], "scalar": torch.tensor(3)}  # fmt: skip
    for legacy in (False, True):
        torch.save(stored, tmp_path / "x.pth", _use_new_zipfile_serialization=not legacy)
        found = open_tensors(tmp_path / "x.pth", allow_pickle=True)
        assert all(torch.equal(found[name], value) for name, value in stored.items())
    del stored["t"]
    torch.save(stored, tmp_path / "x.pth")
    found = open_tensors(tmp_path / "x.pth", allow_pickle=True)
    assert all(entry.held is None for entry in found.entries.values())
    for name, value in stored.items():
        target = torch.empty_like(value)
        found.copy_into(name, target.detach())
        assert torch.equal(target, value)


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
    for read in (llama2c.read, llama2c.looks_like, lambda path: open_tensors(path, allow_pickle=True)):
        with pytest.raises(CheckpointError, match=r"m\.bin: it is not a regular file"):
            read(tmp_path / "m.bin")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_what_may_not_be_read_is_named(folder, name, monkeypatch):
    real = os.open

    def refuses(path, *rest, **named):
        if str(path).endswith(name):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(CheckpointError, match=rf"cannot read .*{name}: Permission denied"):
        load_model(folder)


def test_a_file_that_became_shorter_is_named_instead_of_a_crash(folder):
    tensors = load_folder(folder).tensors
    os.truncate(folder / "model.safetensors", 2000)
    target = torch.empty(tensors.forms["lm_head.weight"].shape)
    for read in (lambda: tensors["lm_head.weight"], lambda: tensors.copy_into("lm_head.weight", target)):
        with pytest.raises(CheckpointError, match="has become shorter since it was opened"):
            read()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[1, 2]", "must hold a JSON object, but holds a list"),
        (b'"x"', "must hold a JSON object, but holds a str"),
        (b"null", "must hold a JSON object, but holds a NoneType"),
        (b"", "it is empty"),
        (b"   \n ", "is not valid JSON"),
        (b'{"a": 1, "a": 1}', "the key 'a' is there twice"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "the key 'b' is there twice"),
        (b'{"a": 1e400}', "1e400 is beyond the largest number"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": 1', "is not valid JSON"),
        (b'{"a": \xe9}', "it is not UTF-8: .* at byte 6"),
        ('{"a": 1}'.encode("utf-16"), "it is not UTF-8"),
        (b'{"a": ' + b"[" * 65 + b"]" * 65 + b"}", "nested more than 64 levels"),
        (b'{"a": ' + b'{"a": ' * 100_000, "nested more than 64 levels"),
        (b"<html>404</html>", "it is an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it is a git-lfs pointer"),
    ],
    ids=lambda x: str(x)[:30],
)  # fmt: skip
def test_json_that_is_none_is_named(folder, name, raw, message):
    (folder / name).write_bytes(raw)
    with pytest.raises(CheckpointError, match=rf"{name} .*{message}"), small_memory():
        load_folder(folder)


def test_a_gigabyte_of_whitespace_is_not_read(folder):
    with open(folder / "config.json", "r+b") as file:
        file.truncate(2**30)
    with (
        pytest.raises(CheckpointError, match="has 1,073,741,824 bytes, and at most 33,554,432"),
        small_memory(),
    ):
        load_folder(folder)
    (folder / "config.json").write_bytes(b" " * LONGEST_JSON)
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        load_folder(folder)


def test_a_byte_order_mark_is_taken(folder):
    file = folder / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert load_folder(folder).spec == load_folder(folder).spec
    assert read_json(file)["vocab_size"] == 61


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize(
    "value", [10**12, 10**9, 10**6, -1, 0, 1.5, 1e308, "61", True, [61], {}, 2**63, 10**30]
)
def test_sizes_that_no_model_has_are_named_and_nothing_of_that_size_is_made(tmp_path, family, key, value):
    spec = ModelSpec.of(family, vocab=61, width=16, layers=2, heads=4, kv_heads=2, hidden=24, head_dim=4)
    save_folder(tmp_path / "m", spec.build(seed=0))
    set_config(tmp_path / "m", **{key: value})
    with small_memory():
        if key == "max_position_embeddings" and value in (10**9, 10**6):
            assert load_folder(tmp_path / "m").spec.trained_context == value
            return
        with pytest.raises(HeadwayError) as caught:
            load_folder(tmp_path / "m")
    assert str(tmp_path / "m") in str(caught.value)
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize("layers", [3, 1000, 10_000, 10_001, 10**9, 10**12])
def test_more_layers_than_there_are_tensors_are_refused_before_they_are_named(folder, layers):
    set_config(folder, num_hidden_layers=layers)
    message = "missing: model.layers.2" if layers == 3 else "layers"
    with pytest.raises(HeadwayError, match=message), small_memory():
        load_folder(folder)


def test_a_folder_of_headway_s_own_type_has_the_same_limits(tmp_path):

    own = ModelSpec(**{**vars(SPEC), "positions": Rotary(pairing="adjacent")})
    save_folder(tmp_path / "m", own.build(seed=0), keep_pairing=True)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    for field, value, message in (
        ("layers", 10**9, "layers is 1,000,000,000, and at most 10,000"),
        ("head_dim", 10**9, "head_dim is 1,000,000,000, and at most 65,536"),
        ("vocab", 10**12, "vocab is 1,000,000,000,000, and at most 2,147,483,647"),
        ("tied", "no", '"headway.tied" must be bool, got .no.'),
        ("width", 16.0, '"headway.width" must be int, got 16.0'),
        ("norm_eps", True, '"headway.norm_eps" must be float, got True'),
        ("family", 1, '"headway.family" must be str, got 1'),
        ("patterns", [[]], "must be Pattern values"),
        ("encoder", 0.5, '"headway.encoder" must be ModelSpec . None, got 0.5'),
        ("encoder", {"kind": "ModelSpec", "layers": 10**9}, "layers is 1,000,000,000, and at most 10,000"),
        ("head", "states", '"headway.head" must be Head, got .states.'),
        ("positions", None, '"headway.positions" must be PositionScheme, got None'),
    ):
        changed = {**config, "headway": {**config["headway"], field: value}}
        (tmp_path / "m" / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=message) as caught, small_memory():
            load_folder(tmp_path / "m")
        assert str(tmp_path / "m" / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "has no model with a vocab"),
        ({"model": [1]}, "has no model with a vocab"),
        ({"model": {"vocab": 3}}, "has no model with a vocab"),
        ({"model": {"vocab": {"a": "0"}}}, "the ids of its tokens must be whole numbers"),
        ({"model": {"vocab": {}}, "added_tokens": [3]}, "the ids of its tokens must be whole numbers"),
        ({"model": {"vocab": {}}, "added_tokens": {"a": 1}}, "has no model with a vocab"),
    ],
)
def test_inspect_names_a_tokenizer_file_that_is_none(folder, content, message):
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json:? {message}"):
        inspect(folder)


def test_an_empty_folder_and_a_file_are_named(tmp_path):
    (tmp_path / "m").mkdir()
    with pytest.raises(CheckpointError, match=r"has no config\.json: it is not a model folder"):
        load_folder(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"holds no weights: .* found nothing"):
        open_tensors(tmp_path / "m")
    (tmp_path / "f").write_text("x")
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        load_folder(tmp_path / "f")
    with pytest.raises(CheckpointError, match="No such file"):
        open_regular(tmp_path / "nowhere")


@pytest.mark.parametrize("header", [
    (8, 8, 2**31 - 1, 2, 2, 8, 8), (2**30, 8, 1, 1, 1, 8, 8), (8, 2**31 - 1, 2, 2, 2, 2**31 - 1, 2**31 - 1),
    (6, 8, 1, 2, 2, 8, 8), (8, 8, -1, 2, 2, 8, 8), (8, 8, 1, 0, 2, 8, 8), (8, 8, 1, 2, 2, 0, 8)], ids=str)  # fmt: skip
def test_a_header_of_llama2_c_that_cannot_be_is_named(tmp_path, header):
    (tmp_path / "m.bin").write_bytes(struct.pack("<7i", *header) + bytes(500))
    with pytest.raises(HeadwayError, match=r"m\.bin"), small_memory():
        llama2c.read(tmp_path / "m.bin")
