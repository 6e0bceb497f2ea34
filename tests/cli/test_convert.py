"""`headway convert` and `headway inspect`, run as commands."""

import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from headway.checkpoints import convert, load_model, save_folder
from headway.cli import run
from headway.errors import CheckpointError
from headway.models import ModelSpec, build, cost
from headway.models.description import layer_numbers
from headway.patterns import Causal, Window
from headway.positions import NoPositions, Rotary, YaRN


@pytest.fixture
def folder(tmp_path):
    spec = ModelSpec.of("llama", vocab=61, width=16, layers=4, heads=4, kv_heads=2, hidden=24, init_std=0.3,
                        patterns=(Window.last(5), Causal()), positions=Rotary(pairing="halves", scaling=YaRN(4.0, 16)),
                        trained_context=64, max_context=100)  # fmt: skip
    save_folder(tmp_path / "m", build(spec, seed=0).eval(), generation={"eos_token_id": 2})
    return tmp_path / "m"


def test_convert_says_how_equal_they_are(folder, tmp_path, capsys):
    assert run(["convert", str(folder), str(tmp_path / "x"), "--to-pairing", "adjacent"]) == 0
    out = capsys.readouterr().out
    for part in (
        "pairing='adjacent'",
        "float32",
        "bfloat16",
        "transformers refuses it: it cannot express its rotary pairing",
    ):
        assert part in out
    assert run(["convert", str(tmp_path / "x"), str(tmp_path / "y"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row[0] for row in report["changed"]] == ["positions"]
    assert [c["dtype"] for c in report["differences"]] == ["float32", "bfloat16"]
    assert (tmp_path / "y" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_an_existing_target_needs_the_flag(folder, tmp_path, capsys):
    assert run(["convert", str(folder), str(tmp_path / "x")]) == 0
    (tmp_path / "x" / "notes").write_text("mine")
    assert run(["convert", str(folder), str(tmp_path / "x")]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert run(["convert", str(folder), str(tmp_path / "x"), "--overwrite"]) == 0
    assert (tmp_path / "x" / "notes").read_text() == "mine"


PAIRS = "must be halves or adjacent, or pairs such as"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--from gguf", 1, "is of format 'hf', not 'gguf' as requested"),
        ("--dtype q3_k --to gguf", 1, "--dtype q3_k: must be one of float32"),
        ("--dtype bfloat", 1, '(did you mean "bfloat16"?)'),
        ("--dtype int8", 1, "--dtype int8: must be one of"),
        ("--dtype q8_0", 1, "the target is a folder"),
        ("--dtype float64 --to gguf", 1, "dtype torch.float64 is not a type of GGUF files"),
        ("--to gguf --to-pairing halves", 1, "one file in the pairing of its architecture"),
        ("--to gguf --shard-size 1GB", 1, "one file in the pairing of its architecture"),
        ("--shard-size 0", 1, "--shard-size 0: must be a positive number of bytes"),
        (
            "--shard-size 4GXB",
            1,
            "--shard-size 4GXB: must be a positive number of bytes, or one such as 500MB",
        ),
        ("--to-pairing half", 1, f"--to-pairing half: {PAIRS}"),
        ("--to-pairing (0,1,2)", 1, PAIRS),
        ("--to-pairing 0-1", 1, PAIRS),
        ("--to-pairing=", 1, PAIRS),
        ("--to-pairing (0,1),(2,3),(4,5)", 1, "lists 3 pairs, but 4 rotated dims are 2"),
        ("--to-pairing (0,1),(2,2)", 1, "must use every coordinate"),
        (
            "--kv-heads 1",
            1,
            "2 kv heads cannot be repeated to kv_heads=1 under 4 query heads; possible are 2, 4",
        ),
        (
            "--kv-heads 3",
            1,
            "2 kv heads cannot be repeated to kv_heads=3 under 4 query heads; possible are 2, 4",
        ),
        (
            "--kv-heads 8",
            1,
            "2 kv heads cannot be repeated to kv_heads=8 under 4 query heads; possible are 2, 4",
        ),
        ("--from onnx", 2, "'onnx' is not one of"),
        ("--to ggml", 2, "'ggml' is not one of"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_written(folder, tmp_path, capsys, options, code, message):
    assert run(["convert", str(folder), str(tmp_path / "x"), *options.split()]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_pairing_is_refused_where_nothing_rotates(tmp_path):
    spec = ModelSpec.of("llama", vocab=61, width=24, layers=1, heads=4, hidden=24, positions=NoPositions())
    save_folder(tmp_path / "0", build(spec, seed=0))
    with pytest.raises(CheckpointError, match="has no rotary positions; remove to_pairing"):
        convert(tmp_path / "0", tmp_path / "1", to_pairing="adjacent")


def test_sources_that_are_nothing(tmp_path, capsys):
    assert run(["convert", str(tmp_path / "no"), str(tmp_path / "x")]) == 2
    assert f"{tmp_path / 'no'}: no such file or folder" in capsys.readouterr().err
    (tmp_path / "x.onnx").write_bytes(b"ONNX")
    with pytest.raises(CheckpointError, match="a file of unknown format"):
        convert(tmp_path / "x.onnx", tmp_path / "y")


def test_inspect_prints_what_the_model_is(folder, capsys):
    assert run(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    for part in (
        "family         llama (model_type ministral); transformers loads it",
        "layers 0, 2: Window.last(5)",
        "layers 1, 3: Causal()",
        "pairing halves (transformers' ministral rotates halves)",
        "YaRN(factor=4.0, trained_context=16",
        "amplitude 1.13863",
        "64 tokens (before rotary scaling 16); refuses more than 100",
        "4 query, 2 key/value (GQA), 4 dims each",
        "none in the folder",
        "eos 2",
    ):
        assert part in out, part
    assert run(["inspect", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    spec = load_model(folder).spec
    assert report["rotary"]["frequencies"] == spec.positions.frequencies(4).tolist()
    assert (
        report["parameter_count"]
        == cost.parameter_count(spec)
        == sum(p.numel() for p in load_model(folder).parameters())
    )
    assert report["stored_bytes"] == 4 * cost.parameter_count(spec)
    assert report["patterns"] == [["0, 2", "Window.last(5)"], ["1, 3", "Causal()"]]


def test_inspect_of_a_broken_folder(folder, capsys):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    assert run(["inspect", str(folder)]) == 1
    assert "model.safetensors is truncated" in capsys.readouterr().err


def test_a_tokenizer_that_does_not_fit_is_said(folder, capsys):
    words = models.BPE({f"t{i}": i for i in range(71)}, [])
    (folder / "tokenizer.json").write_text(Backend(words).to_str())
    assert run(["inspect", str(folder)]) == 0
    assert (
        "BPE, 71 tokens (DOES NOT FIT: the embedding has 61 rows); no chat template"
        in capsys.readouterr().out
    )


def test_layer_numbers():
    assert layer_numbers([0, 1, 2]) == "0-2"
    assert layer_numbers([0, 2, 4, 6]) == "0, 2 .. 6"
    assert layer_numbers([0, 1, 5, 7]) == "0-1, 5, 7"
