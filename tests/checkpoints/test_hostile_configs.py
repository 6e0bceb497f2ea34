"""Invalid JSON, and sizes that no model has: reported, and nothing of that size is allocated."""

import json

import pytest

from headway.checkpoints import inspect, load_folder, save_folder
from headway.errors import CheckpointError, ConfigError, DataError, HeadwayError
from headway.models import ModelSpec, build
from headway.positions import Rotary
from headway.storage.reading import LONGEST_JSON, read_json
from tests.checkpoints.edits import set_keys
from tests.checkpoints.hostile import SPEC, small_memory


@pytest.fixture
def folder(tmp_path):
    save_folder(tmp_path / "m", build(SPEC, seed=0), generation={"eos_token_id": 2})
    return tmp_path / "m"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[1, 2]", "must hold a JSON object, but holds a list"),
        (b'"x"', "must hold a JSON object, but holds a str"),
        (b"null", "must hold a JSON object, but holds a NoneType"),
        (b"", "it is empty"),
        (b"   \n ", "is not valid JSON"),
        (b'{"a": 1, "a": 1}', "the key 'a' occurs twice"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "the key 'b' occurs twice"),
        (b'{"a": 1e400}', "1e400 is beyond the largest number"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": 1', "is not valid JSON"),
        (b'{"a": \xe9}', "it is not UTF-8: .* at byte 6"),
        ('{"a": 1}'.encode("utf-16"), "it is not UTF-8"),
        (b'{"a": ' + b"[" * 65 + b"]" * 65 + b"}", "nested more than 64 levels"),
        (b'{"a": ' + b'{"a": ' * 100_000, "nested more than 64 levels"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not valid JSON: Exceeds the limit"),
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
        pytest.raises(CheckpointError, match="has 1,073,741,824 bytes, above the limit of 33,554,432"),
        small_memory(),
    ):
        load_folder(folder)
    (folder / "config.json").write_bytes(b" " * LONGEST_JSON)
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        load_folder(folder)


def test_a_byte_order_mark_is_taken(folder):
    file, spec = folder / "config.json", load_folder(folder).spec
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert load_folder(folder).spec == spec
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
    save_folder(tmp_path / "m", build(spec, seed=0))
    set_keys(tmp_path / "m", **{key: value})
    with small_memory():
        if key == "max_position_embeddings" and value in (10**9, 10**6):
            assert load_folder(tmp_path / "m").spec.trained_context == value
            return
        with pytest.raises(HeadwayError) as error:
            load_folder(tmp_path / "m")
    assert str(tmp_path / "m") in str(error.value)
    assert len(str(error.value)) < 5000


@pytest.mark.parametrize("layers", [3, 1000, 10_000, 10_001, 10**9, 10**12])
def test_more_layers_than_there_are_tensors_are_refused_before_they_are_named(folder, layers):
    set_keys(folder, num_hidden_layers=layers)
    message = "missing: model.layers.2" if layers == 3 else "layers"
    with pytest.raises(HeadwayError, match=message), small_memory():
        load_folder(folder)


def test_a_folder_of_headway_s_own_type_has_the_same_limits(tmp_path):
    spec = ModelSpec(**{**vars(SPEC), "positions": Rotary(pairing="adjacent")})
    save_folder(tmp_path / "m", build(spec, seed=0), keep_pairing=True)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    for field, value, message in (
        ("layers", 10**9, "layers is 1,000,000,000; at most 10,000"),
        ("head_dim", 10**9, "head_dim is 1,000,000,000; at most 65,536"),
        ("vocab", 10**12, "vocab is 1,000,000,000,000; at most 2,147,483,647"),
        ("layer_hidden", [0, 2**64], "layer_hidden is 18,446,744,073,709,551,616; at most"),
        ("tied", "no", '"headway.tied" must be bool, got .no.'),
        ("width", 16.0, '"headway.width" must be int, got 16.0'),
        ("norm_eps", True, '"headway.norm_eps" must be float, got True'),
        ("family", 1, '"headway.family" must be str, got 1'),
        ("patterns", [[]], "must be Pattern values"),
        ("encoder", 0.5, '"headway.encoder" must be ModelSpec . None, got 0.5'),
        ("encoder", {"kind": "ModelSpec", "layers": 10**9}, "layers is 1,000,000,000; at most 10,000"),
        ("head", "states", '"headway.head" must be Head, got .states.'),
        ("positions", None, '"headway.positions" must be PositionScheme, got None'),
    ):
        changed = {**config, "headway": {**config["headway"], field: value}}
        (tmp_path / "m" / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=message) as error, small_memory():
            load_folder(tmp_path / "m")
        assert str(tmp_path / "m" / "config.json") in str(error.value)


@pytest.mark.parametrize("content", [{}, {"model": [1]}, {"model": {"vocab": {"a": "0"}}}])
def test_inspect_names_a_tokenizer_file_that_is_none(folder, content):
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer\.json"):
        inspect(folder)
