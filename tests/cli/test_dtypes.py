"""One rule decides in which dtype a model runs and is counted: `headway.storage.dtypes`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import headway
from headway.checkpoints import load_folder, save_folder
from headway.cli import run
from headway.models import ModelSpec, build, cost
from headway.models.cost.planning import Machine
from headway.models.quantize import quantized_layers
from headway.surgery.quantize import quantize_folder
from headway.text import train_bpe

WORDS = "one two three four five six seven eight nine ten eleven twelve "
SPEC = ModelSpec.of(
    "llama", vocab=280, width=64, layers=2, heads=4, kv_heads=2, hidden=96, trained_context=32
)
Json = Callable[..., dict[str, object]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of one model, named by the dtype of their files, and `text.txt`."""
    monkeypatch.chdir(tmp_path)
    machine = Machine(name="box", memory=32 << 30, bandwidth=20e9, peak=500e9)
    monkeypatch.setattr(Machine, "here", staticmethod(lambda dtype: machine))
    model, tokenizer = build(SPEC, seed=0).eval(), train_bpe([WORDS], 280)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        save_folder(str(dtype).removeprefix("torch."), model, tokenizer=tokenizer, dtype=dtype)
    for weights, made_of in (("int8", "float32"), ("int4", "bfloat16")):
        quantize_folder(load_folder(made_of), weights, weights)
    Path("text.txt").write_text(WORDS * 10)
    return tmp_path


@pytest.fixture
def report(home: Path, capsys: pytest.CaptureFixture[str]) -> Json:
    """Returns a function that runs a command with --json and returns its report."""

    def printed(*arguments: str) -> dict[str, object]:
        assert run([*arguments, "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    return printed


@pytest.mark.parametrize(
    ("folder", "dtype"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float32"),
        ("int8", "float32"),
        ("int4", "bfloat16"),
    ],
)
def test_a_folder_runs_and_is_counted_in_what_its_file_holds(folder: str, dtype: str, report: Json) -> None:
    """By `load`, which generate uses, by eval and by plan; a float16 file runs in float32 on a CPU."""
    model = headway.load(folder).model
    assert next(model.parameters()).dtype == getattr(torch, dtype)
    assert report("eval", folder, "--data", "text.txt")["dtype"] == dtype
    planned = report("plan", folder)
    assert planned["dtype"] == planned["kv_dtype"] == dtype
    layers = [weight.nbytes for weight in quantized_layers(model).values()]
    expected = sum(p.nbytes for p in model.parameters()) + sum(layers)
    assert bool(layers) == folder.startswith("int")
    assert planned["weights"] == expected


def test_what_is_asked_for_is_taken_by_all(report: Json, capsys: pytest.CaptureFixture[str]) -> None:
    for dtype, name in (("bf16", "bfloat16"), ("fp32", "float32"), ("float32", "float32")):
        assert report("eval", "bfloat16", "--data", "text.txt", "--dtype", dtype)["dtype"] == name
        assert report("plan", "bfloat16", "--dtype", dtype)["dtype"] == name
    for command in (["eval", "int4", "--data", "text.txt"], ["plan", "int4"], ["generate", "int4", "one"]):
        assert run([*command, "--dtype", "flaot32"]) == 1
        assert "there is no dtype 'flaot32' (did you mean \"float32\"?)" in capsys.readouterr().err


def test_the_dtype_is_said_with_its_reason(report: Json, capsys: pytest.CaptureFixture[str]) -> None:
    count = len(load_folder("float32").tensors)
    for command, message in (
        (["plan", "float32"], f"note: float32: all that the file holds: {count} tensors float32"),
        (["plan", "float16"], "note: float32: holds every float16 number exactly"),
        (["plan", "gpt2"], "note: bfloat16: a size of the catalog has no file"),
        (["plan", "float32", "--dtype", "bf16"], "note: bfloat16: asked for"),
        (
            ["eval", "float32", "--data", "text.txt"],
            f"in float32: all that the file holds: {count} tensors float32",
        ),
    ):
        assert run(command) == 0
        printed = capsys.readouterr()
        assert message in (printed.err if "eval" in command else printed.out)
    assert run(["generate", "float16", "one two", "-n", "2"]) == 0
    assert "tokens/s, in float32" in capsys.readouterr().err


def test_a_difference_counts_each_model_as_it_is_kept(report: Json) -> None:
    report_of_diff = report("diff", "float32", "int8")
    numbers = {row["name"]: row for row in report_of_diff["numbers"]}  # type: ignore[attr-defined]
    n = cost.parameter_count(SPEC)
    assert numbers["weights, bytes"]["first"] == 4 * n
    assert numbers["weights, bytes"]["second"] == report("plan", "int8")["weights"]
    assert numbers["parameters"]["ratio"] == 1
    assert report_of_diff["differences"] == [
        {
            "aspect": "weights",
            "first": "float32",
            "second": "int8 in the blocks with a scale for each 32 inputs, else float32",
        }
    ]
    half = {row["name"]: row for row in report("diff", "float32", "bfloat16")["numbers"]}  # type: ignore[attr-defined]
    assert half["weights, bytes"]["ratio"] == half["keys and values, bytes per token"]["ratio"] == 0.5
    family = {row["name"]: row for row in report("diff", "float32", "mistral")["numbers"]}  # type: ignore[attr-defined]
    assert family["weights, bytes"]["second"] == 4 * family["parameters"]["second"]
